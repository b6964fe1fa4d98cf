// SPDX-License-Identifier: Apache-2.0
//
// The hosts: queues that fill and drain, registered memory with its keys, the QP state machine.
import {bytesText, el, hex, list, number, opcodeText, svg, text, tr} from './text.js';

const CELLS = 12;
const QPS_SHOWN = 3;
const REGIONS_SHOWN = 4;
const BYTES_PER_LINE = 8;
const LINES = 4;
const TOUCH_NS = 1.5e9;

const RIGHTS = [[1, 'local write'], [2, 'remote write'], [4, 'remote read'], [8, 'remote atomic'],
  [16, 'bind']];

// A ring of which `waiting` are to be done and `underway` are being done.
function ring(name, title, waiting, underway, total, capacity) {
  const cells = [];
  const busy = waiting + underway;
  const scale = busy > CELLS ? busy / CELLS : 1;
  const head = total % CELLS;
  for (let i = 0; i < CELLS; ++i) {
    // Counted from the ring's oldest entry.
    const age = (i - ((head - Math.min(CELLS, Math.ceil(busy / scale))) % CELLS) + 2 * CELLS) % CELLS;
    const kind = age * scale < underway ? 'underway' : age * scale < busy ? 'waiting' : 'free';
    cells.push(el('span', {class: `cell ${kind}`}));
  }
  const words = [tr('{0}: {1} waiting', tr(title), waiting),
    underway && tr('{0} under way', underway), tr('{0} so far', total),
    capacity && tr('room for {0}', capacity)].filter(Boolean).join(tr(', '));
  return el('div', {class: 'ring', role: 'img', 'aria-label': words, title: words},
    el('span', {class: 'ring-name'}, name), el('span', {class: 'cells'}, cells),
    el('span', {class: 'ring-count'}, busy ? `${busy}` : '', el('small', {}, ` Σ${total}`)));
}

function queuesOf(model, qp) {
  const listed = qp.listed;
  if (!listed) {
    const sent = qp.open.filter((wr) => wr.sent !== null).length;
    return [ring('SQ', 'Send queue', qp.open.length - sent, sent, qp.posted),
      // Receives are not in the trace until they are completed: as many as it was seen to have.
      ring('RQ', 'Receive queue', 0, 0, Math.max(qp.rqPosted, qp.received)),
      ring('CQ', 'Completion queue', 0, 0, qp.completed + qp.received)];
  }
  const fetched = number(listed.sq_posted) - number(listed.sq_fetched);
  const open = Math.max(0, Math.min(qp.open.length, number(listed.sq_fetched)));
  const underway = number(listed.outstanding) ? Math.max(1, open) : 0;
  const rings = [
    ring('SQ', 'Send queue', Math.max(0, fetched), underway, number(listed.sq_posted)),
    listed.srqn === null || listed.srqn === undefined
      ? ring('RQ', 'Receive queue', number(listed.rq_posted) - number(listed.rq_taken), 0,
        number(listed.rq_posted))
      : srqOf(model, listed)];
  // A QP's CQs are not listed with it: those of its process that are in use.
  const cqs = list(model.state && model.state.cq).filter((cq) => cq.pid === listed.pid &&
    cq.device === listed.device && number(cq.qps) > 0).slice(0, 2);
  for (const cq of cqs) {
    rings.push(ring('CQ', 'Completion queue',
      Math.max(0, number(cq.written) - number(cq.read)), 0, number(cq.written), number(cq.cqe)));
  }
  return rings;
}

function srqOf(model, listed) {
  const srq = list(model.state && model.state.srq).find((each) => each.srqn === listed.srqn);
  return srq ? ring('SRQ', 'Shared receive queue', number(srq.posted) - number(srq.taken), 0,
    number(srq.posted), number(srq.max_wr)) : null;
}

function qpBlock(model, qp) {
  const bad = qp.state === 'ERR' || qp.state === 'SQE';
  const owner = (qp.comm ? `${qp.comm} (pid ${qp.pid})` : '') + (qp.listed ? '' : ` ${tr('ended')}`);
  return el('section', {class: 'qp'},
    el('header', {},
      el('strong', {}, `QP ${hex(qp.qpn)}`), el('span', {class: 'dim'}, ` ${qp.type}`),
      el('span', {class: `state ${bad ? 'bad' : qp.state === 'RTS' ? 'good' : ''}`}, qp.state || '?')),
    el('div', {class: 'dim owner'}, owner, qp.peer ? ` ↔ ${hex(qp.peer)}` : ''),
    queuesOf(model, qp));
}

class Memory {
  constructor() { this.before = new Map(); }

  // Bytes, eight to a line; those that changed lately are marked.
  dump(region, now) {
    const digits = text(region.bytes);
    const key = `${region.pid}:${region.lkey}:${region.address}`;
    let known = this.before.get(key);
    if (!known) this.before.set(key, known = {digits, changed: new Map()});
    for (let i = 0; i < digits.length; i += 2) {
      if (known.digits.slice(i, i + 2) !== digits.slice(i, i + 2)) known.changed.set(i / 2, now);
    }
    known.digits = digits;
    if (this.before.size > 500) this.before.clear();
    const lines = [];
    const count = Math.min(digits.length / 2, BYTES_PER_LINE * LINES);
    for (let start = 0; start < count; start += BYTES_PER_LINE) {
      const cells = [], letters = [];
      for (let i = start; i < Math.min(count, start + BYTES_PER_LINE); ++i) {
        const value = parseInt(digits.slice(2 * i, 2 * i + 2), 16);
        const fresh = now - (known.changed.get(i) ?? -Infinity) < TOUCH_NS;
        cells.push(el('span', {class: fresh ? 'byte fresh' : value ? 'byte' : 'byte zero'},
          digits.slice(2 * i, 2 * i + 2)));
        letters.push(value >= 32 && value < 127 ? String.fromCharCode(value) : '·');
      }
      lines.push(el('div', {class: 'line'}, cells, el('span', {class: 'letters'}, letters.join(''))));
    }
    return lines;
  }

  block(model, region) {
    const rights = RIGHTS.filter(([bit]) => number(region.access) & bit).map(([, name]) => name);
    const now = model.now;
    const touches = model.touched.filter((each) => each.rkey === region.rkey &&
      now - each.t < TOUCH_NS);
    const last = touches[touches.length - 1];
    const lines = this.dump(region, now);
    return el('section', {class: `region${last ? ' touched' : ''}`},
      el('header', {}, el('strong', {}, `${tr('key')} ${hex(region.rkey)}`)),
      el('div', {class: 'dim place'}, tr('{0} at {1}', bytesText(number(region.length)),
        hex(region.address))),
      el('div', {class: 'rights'}, rights.length ? rights.map((name) => tr(name)).join(' · ')
        : tr('local read only'),
        last ? el('span', {class: 'touch'},
          ` ${opcodeText(last.opcode)} +${number(last.address) - number(region.iova)}`) : null),
      lines.length ? el('div', {class: 'bytes', role: 'img',
        'aria-label': tr('The first bytes of this memory')}, lines) : null);
  }
}

export class Hosts {
  constructor(model, left, right) {
    this.model = model;
    this.places = [left, right];
    this.memory = new Memory();
    this.filter = '';
  }

  draw() {
    const {model} = this;
    const devices = model.devices();
    const qps = model.shownQps(this.filter);
    const bySide = [[], []];
    for (const qp of qps) bySide[model.laneOf(qp.qpn)].push(qp);
    this.places.forEach((place, side) => {
      const names = new Set(bySide[side].map((qp) => qp.device));
      if (names.size === 0 && devices[side]) names.add(devices[side]);
      const nics = list(model.state && model.state.status && model.state.status.nics);
      const children = [];
      for (const name of names) {
        const nic = nics.find((each) => each.device === name) || {};
        children.push(el('header', {class: 'host-name'}, el('h2', {}, name),
          el('span', {class: 'dim'}, [text(nic.ipv4), text(nic.host)].filter(Boolean).join(' · '))));
      }
      if (names.size === 0) children.push(el('h2', {}, tr(side ? 'no second NIC' : 'no NIC')));
      const mine = bySide[side];
      children.push(...mine.slice(0, QPS_SHOWN).map((qp) => qpBlock(model, qp)));
      if (mine.length > 0) {
        children.push(el('p', {class: 'dim legend'}, el('i', {class: 'waiting'}), tr('waits'),
          el('i', {class: 'underway'}), tr('under way'), el('b', {}, 'Σ'), tr('in total')));
      }
      if (mine.length > QPS_SHOWN) {
        children.push(el('p', {class: 'dim'},
          tr('and {0} more QPs: choose one above', mine.length - QPS_SHOWN)));
      }
      if (mine.length === 0) {
        children.push(el('p', {class: 'dim'}, tr(
          'No queue pair here yet. Start a transfer, or run any RDMA program with verbena run.')));
      }
      const pids = new Set(mine.map((qp) => qp.pid));
      const regions = [...pids].flatMap((pid) => model.memory.get(pid) || []).filter((region) =>
        names.has(region.device));
      if (regions.length > 0) children.push(el('h3', {}, tr('Registered memory')));
      children.push(...regions.slice(0, REGIONS_SHOWN).map((region) =>
        this.memory.block(model, region)));
      if (regions.length > REGIONS_SHOWN) {
        children.push(el('p', {class: 'dim'},
          tr('and {0} more regions', regions.length - REGIONS_SHOWN)));
      }
      place.replaceChildren(...children);
    });
  }
}

const STATES = {RESET: [52, 24], INIT: [152, 24], RTR: [252, 24], RTS: [352, 24], SQD: [352, 84],
  SQE: [252, 84], ERR: [112, 84]};
const WAYS = [['RESET', 'INIT'], ['INIT', 'RTR'], ['RTR', 'RTS'], ['RTS', 'SQD'], ['RTS', 'SQE']];

// The state machine with the ends of one connection in it.
export function stateMachine(qps) {
  const here = new Map();
  const visited = new Set();
  qps.slice(0, 2).forEach((qp, i) => {
    if (!here.has(qp.state)) here.set(qp.state, []);
    here.get(qp.state).push(i);
    for (const state of qp.visited) visited.add(state);
  });
  const words = qps.slice(0, 2).map((qp) => tr('QP {0} is in {1}', hex(qp.qpn), qp.state || '?'))
    .join(tr(', '));
  const boxes = Object.entries(STATES).map(([name, [x, y]]) => {
    const now = here.has(name);
    const kind = now ? (name === 'ERR' || name === 'SQE' ? 'now bad' : 'now') : visited.has(name)
      ? 'been' : '';
    return svg('g', {class: `state-box ${kind}`},
      svg('rect', {x: x - 36, y: y - 15, width: 72, height: 30, rx: 6}),
      svg('text', {x, y: y + 5}, name));
  });
  const ways = WAYS.map(([from, to]) => {
    const [x1, y1] = STATES[from], [x2, y2] = STATES[to];
    const flat = y1 === y2;
    const d = flat ? `M${x1 + 36} ${y1}H${x2 - 43}` : x1 === x2 ? `M${x1} ${y1 + 15}V${y2 - 22}`
      : `M${x1 - 18} ${y1 + 15}L${x2 + 22} ${y2 - 18}`;
    return svg('path', {d, class: 'way', 'marker-end': 'url(#way-head)'});
  });
  ways.push(svg('path', {class: 'way dashed', d: 'M216 84H155', 'marker-end': 'url(#way-head)'}),
    svg('path', {class: 'way dashed', d: 'M220 34L155 68', 'marker-end': 'url(#way-head)'}));
  return svg('svg', {viewBox: '4 2 396 106', class: 'machine', role: 'img',
    'aria-label': words || tr('No QP')},
  svg('defs', {}, svg('marker', {id: 'way-head', viewBox: '0 0 8 8', refX: 1, refY: 4,
    markerWidth: 7, markerHeight: 7, orient: 'auto'}, svg('path', {d: 'M0 0L8 4L0 8Z'}))),
  ways, boxes);
}
