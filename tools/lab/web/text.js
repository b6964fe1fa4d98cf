// SPDX-License-Identifier: Apache-2.0
//
// Elements and words. Text that comes from applications only ever becomes text nodes.

import {ZH} from './zh.js';

const TABLES = {en: {}, zh: ZH};
let language = 'en';

// The page's language: what the address asks for (?lang=zh), else the browser's.
export function chooseLanguage(wanted) {
  const asked = wanted || new URLSearchParams(location.search).get('lang') || navigator.language || '';
  language = asked.toLowerCase().startsWith('zh') ? 'zh' : 'en';
  document.documentElement.lang = language === 'zh' ? 'zh-CN' : 'en';
  return language;
}

// An English sentence in the page's language; {0}, {1} are replaced by the other arguments.
export function tr(english, ...values) {
  const sentence = Object.hasOwn(TABLES[language], english) ? TABLES[language][english] : english;
  return values.length === 0 ? sentence
    : sentence.replace(/\{(\d)\}/g, (_, i) => String(values[Number(i)]));
}

const WORDS = ['title', 'aria-label'];
const originals = new WeakMap();  // node: its English text; of an element: of its attributes

// Puts the fixed texts below an element into the page's language.
export function localize(root) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT);
  for (let node = root; node; node = walker.nextNode()) {
    if (node.nodeType === Node.TEXT_NODE) {
      if (!originals.has(node)) originals.set(node, node.data);
      const [, before, words, after] = /^(\s*)([^]*?)(\s*)$/.exec(originals.get(node));
      const wanted = before + tr(words) + after;
      if (node.data !== wanted) node.data = wanted;
      continue;
    }
    for (const name of WORDS) {
      if (!node.hasAttribute(name)) continue;
      if (!originals.has(node)) originals.set(node, {});
      const known = originals.get(node);
      known[name] ??= node.getAttribute(name);
      node.setAttribute(name, tr(known[name]));
    }
  }
}

// A fixed text that changes: given in English, shown in the page's language.
export function setWords(node, english) {
  if (node.dataset.words === english) return;
  node.dataset.words = english;
  node.textContent = english;
  localize(node);
}

const SVG_NAMESPACE = 'http://www.w3.org/2000/svg';

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === 'on') {
      for (const [type, listener] of Object.entries(value)) node.addEventListener(type, listener);
    } else {
      node.setAttribute(name, value === true ? '' : String(value));
    }
  }
  for (const child of children.flat(2)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child.nodeType ? child : String(child));
  }
  return node;
}

export function el(name, attributes, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes, ...children) {
  return fill(document.createElementNS(SVG_NAMESPACE, name), attributes, children);
}

export function byId(id) { return document.getElementById(id); }

// Numbers of JSON that may be missing or of another type.
export function number(value, fallback = 0) {
  return typeof value === 'number' && Number.isFinite(value) ? value : fallback;
}
export function list(value) { return Array.isArray(value) ? value : []; }
export function text(value, fallback = '') {
  return typeof value === 'string' ? value : fallback;
}

export function hex(value, digits = 0) {
  return '0x' + number(value).toString(16).padStart(digits, '0');
}

export function bytesText(count) {
  if (count < 10000) return `${count} B`;
  if (count < 10 * 1024 * 1024) return `${(count / 1024).toFixed(count % 1024 ? 1 : 0)} KiB`;
  return `${(count / 1024 / 1024).toFixed(1)} MiB`;
}

export function short(value) {
  if (value < 1000) return String(Math.round(value * 10) / 10);
  if (value < 1e6) return `${(value / 1e3).toPrecision(3)}k`;
  if (value < 1e9) return `${(value / 1e6).toPrecision(3)}M`;
  return `${(value / 1e9).toPrecision(3)}G`;
}

export function timeText(ns) {
  if (ns < 1e6) return `${(ns / 1e3).toFixed(1)} µs`;
  if (ns < 1e9) return `${(ns / 1e6).toFixed(3)} ms`;
  return `${(ns / 1e9).toFixed(4)} s`;
}

// RC_RDMA_WRITE_FIRST -> WRITE FIRST; the service is said elsewhere.
export function opcodeText(opcode) {
  return opcode.replace(/^(RC|UC|UD|XRC)_/, '').replace(/^RDMA_/, '').replace('ACKNOWLEDGE', 'ACK')
    .replace(/^ATOMIC_CMP_AND_SWP/, 'CMP_SWAP').replace(/^ATOMIC_FETCH_AND_ADD/, 'FETCH_ADD')
    .replaceAll('_', ' ');
}

const RNR_MS = [655.36, .01, .02, .03, .04, .06, .08, .12, .16, .24, .32, .48, .64, .96, 1.28, 1.92,
  2.56, 3.84, 5.12, 7.68, 10.24, 15.36, 20.48, 30.72, 40.96, 61.44, 81.92, 122.88, 163.84, 245.76,
  327.68, 491.52];
const NAK_NAMES = ['PSN sequence error', 'invalid request', 'remote access error',
  'remote operational error', 'invalid RD request'];

// What the AETH says, in the language of the moment; null without one.
export function syndrome(packet) {
  if (typeof packet.syndrome !== 'number') return null;
  const code = packet.syndrome & 31;
  switch (packet.syndrome >> 5) {
    case 0: return {kind: 'ack', text: 'ACK'};
    case 1: return {kind: 'rnr', get text() { return tr('RNR NAK, wait {0} ms', RNR_MS[code]); }};
    case 3: return {kind: 'nak', get text() { return `NAK: ${tr(NAK_NAMES[code] || 'unknown code')}`; }};
    default: return {kind: 'nak', get text() { return tr('reserved syndrome'); }};
  }
}

// A sentence about what a packet is for.
export function meaning(opcode) {
  const name = opcodeText(opcode);
  const words = [
    [/^SEND/, 'Data for a receive that the other side has posted; its NIC decides where it goes.'],
    [/^WRITE/, 'Data for an address that this side names; the other CPU is not asked.'],
    [/^READ REQUEST/, 'Asks the other NIC for bytes of its memory; the other CPU is not asked.'],
    [/^READ RESPONSE/, 'Bytes that a READ REQUEST asked for, in the PSNs reserved for them.'],
    [/^ATOMIC WRITE/, 'Eight bytes that appear at once.'],
    [/^ATOMIC ACK/, 'The value that the word had before the atomic.'],
    [/^CMP SWAP/, 'If the word there has one value, it gets another; nobody comes between.'],
    [/^FETCH ADD/, 'Adds to a word there and brings back what it was; nobody comes between.'],
    [/^FLUSH/, 'Asks that what was written is visible, or persistent.'],
    [/^ACK/, 'Everything up to this PSN has arrived and is where it belongs.'],
    [/^CNP/, 'Congestion: please send more slowly.'],
  ];
  const parts = [
    [/FIRST/, 'The first packet of a message.'], [/MIDDLE/, 'In the middle of a message.'],
    [/LAST/, 'The last packet of a message.'],
  ];
  const said = words.find(([pattern]) => pattern.test(name));
  const part = parts.find(([pattern]) => pattern.test(name));
  return [said, part].filter(Boolean).map(([, words]) => tr(words)).join(' ');
}
