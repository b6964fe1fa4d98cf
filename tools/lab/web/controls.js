// SPDX-License-Identifier: Apache-2.0
//
// Buttons and forms: transfers, stepping, faults, replay, export.
import {byId, el, list, number, setWords, text, tr} from './text.js';
import {command} from './source.js';

const TRANSFERS = [
  ['send', 'Send / receive', 'Both sides take part: one posts receives, the other sends'],
  ['write', 'RDMA write', 'One side puts bytes into the other\'s memory'],
  ['read', 'RDMA read', 'One side takes bytes from the other\'s memory'],
  ['atomic', 'Atomic lock', 'Compare-and-swap takes a lock, fetch-and-add counts'],
  ['kv', 'Key-value store', 'Gets are reads that the server\'s CPU knows nothing of'],
  ['events', 'Events', 'The receiver sleeps until its completion channel wakes it'],
];

// One click each. psn and nth count what comes from now on.
const FAULTS = [
  ['Drop a data packet', 'drop %data nth=2 count=1', 'The 2nd one from now on: a gap, a NAK, sent again'],
  ['Drop an ACK', 'drop opcode=ack nth=1 count=1', 'The next one: the sender\'s timer runs out'],
  ['Duplicate', 'duplicate %data nth=1 count=1', 'The next data packet arrives twice'],
  ['Damage', 'corrupt %data nth=1 count=1', 'A bit is flipped: its ICRC is wrong'],
  ['Overtake', 'reorder %data by=1 nth=1 count=1', 'The packet behind it arrives first'],
  ['Delay 50 ms', 'delay us=50000 nth=1 count=1', 'The next packet waits'],
  ['5 % loss', 'drop prob=0.05 seed=7', 'Until it is removed'],
  ['Link down 1 s', 'down dev=verbena1 us=1000000', 'Nothing passes for a second'],
  ['Wrong R_Key', 'set reth.rkey=0x1234 atomiceth.rkey=0x1234 count=1', 'The next RDMA request has a wrong key'],
  ['Forge a NAK', 'set aeth.syndrome=0x62 opcode=ack nth=1 count=1', 'The next ACK becomes: remote access error'],
];

const HOLD_RULE = 'hold opcode=any';

function button(label, title, act) {
  return el('button', {type: 'button', title, on: {click: act}}, label);
}

function group(name, ...children) {
  return el('div', {class: 'group', role: 'group', 'aria-label': name},
    el('span', {class: 'group-name'}, name), children);
}

function select(label, id, options, chosen) {
  return el('label', {class: 'field'}, el('span', {}, label),
    el('select', {id}, options.map(([value, name]) =>
      el('option', {value, selected: value === chosen}, name))));
}

// What the lab says of a transfer that failed, in the page's language.
function failure(result) {
  const status = /^an end has failed \(status (\d+)\)$/.exec(result);
  return status ? tr('an end has failed (status {0})', status[1]) : result;
}

export class Controls {
  constructor(model, places, tell) {
    this.model = model;
    this.tell = tell;
    this.slowTimer = 0;
    this.chips = el('span', {class: 'chips', id: 'rules', role: 'group', 'aria-label': 'Active rules'});
    this.transferState = el('span', {class: 'dim', id: 'transfer-state', role: 'status'});
    this.buildTransfers(places.transfers, places);
    this.buildFaults(places.faults);
  }

  async run(name, body) {
    try {
      const answer = await command(name, body);
      this.tell('');
      return answer;
    } catch (error) {
      this.tell(error.message, true);
      return null;
    }
  }

  buildTransfers(place, places) {
    place.append(
      group('Start', TRANSFERS.map(([kind, name, title]) => {
        const each = button(name, title, () => this.start(kind));
        each.dataset.transfer = kind;
        return each;
      })),
      group('Messages',
        select('size', 'size', [['8', '8 B'], ['64', '64 B'], ['4096', '4 KiB'],
          ['16384', '16 KiB'], ['262144', '256 KiB']], '64'),
        select('count', 'count', [['1', '1'], ['4', '4'], ['10', '10'], ['100', '100'],
          ['1000', '1000'], ['0', 'endless']], '4'),
        select('pause', 'pause', [['0', 'none'], ['200', '0.2 s'], ['1000', '1 s']], '200'),
        button('Stop', 'End the transfer', () => this.run('stop'))));
    places.steps.append(
      group('Step',
        el('button', {type: 'button', id: 'hold', 'aria-pressed': 'false',
          title: 'Packets wait until you let them go, one by one', on: {click: () => this.hold()}},
        'Hold packets'),
        el('button', {type: 'button', id: 'step', disabled: true, on: {click: () => this.step(1)},
          title: 'Let the oldest packet go (key: s)'}, 'Step'),
        el('button', {type: 'button', id: 'step10', disabled: true, on: {click: () => this.step(10)},
          title: 'Let ten packets go'}, 'Step 10'),
        select('slow motion', 'slow', [['0', 'off'], ['1000', '1 packet/s'], ['300', '3 packets/s'],
          ['100', '10 packets/s']], '0')),
      group('Active', this.chips, button('Clear all', 'Remove all rules; what is held goes on',
        () => { this.endSlow(); this.run('fault_clear'); })),
      this.transferState);
    byId('slow').addEventListener('change', () => this.slowMotion());
  }

  buildFaults(place) {
    const form = el('form', {class: 'fault-form', id: 'fault-form', on: {submit: (event) => {
      event.preventDefault();
      this.add(this.ruleOfForm());
    }}},
    select('what', 'f-action', ['drop', 'duplicate', 'corrupt', 'reorder', 'delay', 'mark',
      'hold'].map((each) => [each, each]), 'drop'),
    select('which', 'f-opcode', ['any', 'send', 'write', 'read', 'atomic', 'ack'].map((each) =>
      [each, each]), 'any'),
    select('from', 'f-dev', [['', 'any NIC'], ['verbena0', 'verbena0'], ['verbena1', 'verbena1']], ''),
    ...[['PSN +', 'f-psn', 'offset from the QP\'s first PSN'], ['n-th', 'f-nth', ''],
      ['times', 'f-count', ''], ['probability', 'f-prob', '0.1'], ['µs', 'f-us', 'delay']].map(
      ([label, id, hint]) => el('label', {class: 'field'}, el('span', {}, label),
        el('input', {id, size: 6, inputmode: 'decimal', title: hint, autocomplete: 'off'}))),
    el('label', {class: 'field wide'}, el('span', {}, 'rule'),
      el('input', {id: 'f-rule', size: 34, spellcheck: 'false', autocomplete: 'off',
        title: 'As for verbena fault add'})),
    el('button', {type: 'submit'}, 'Add'));
    for (const input of form.querySelectorAll('select, input:not(#f-rule)')) {
      input.addEventListener('input', () => { byId('f-rule').value = this.composed(); });
    }
    place.append(
      group('Faults', FAULTS.map(([name, rule]) => {
        const each = button(name, null,
          () => this.add(rule.replace('%data', this.dataClass())));
        each.dataset.fault = name;
        return each;
      }), el('details', {class: 'more'}, el('summary', {}, 'Rule…'), form)));
    byId('f-rule').value = 'drop';
  }

  // In the page's language, which may have changed.
  words() {
    for (const [name, rule, title] of FAULTS) {
      document.querySelector(`[data-fault="${name}"]`).title =
        `${tr(title)}: ${rule.replace('%data', 'opcode=…')}`;
    }
    this.drawnRules = null;
    this.draw();
  }

  composed() {
    const value = (id) => byId(id).value.trim();
    const parts = [value('f-action')];
    const put = (key, id) => { if (value(id)) parts.push(`${key}=${value(id)}`); };
    if (value('f-opcode') !== 'any') put('opcode', 'f-opcode');
    if (value('f-dev')) parts.push(`dev=${value('f-dev')} dir=tx`);
    put('psn', 'f-psn');
    put('nth', 'f-nth');
    put('count', 'f-count');
    put('prob', 'f-prob');
    put('us', 'f-us');
    return parts.join(' ');
  }
  ruleOfForm() { return byId('f-rule').value.trim() || this.composed(); }

  // The requests of what runs now or ran last; else of whatever comes: those that are longer than
  // an ACK.
  dataClass() {
    const running = text(this.model.state && this.model.state.transfer &&
      this.model.state.transfer.kind);
    const known = {send: 'send', events: 'send', write: 'write', read: 'read', atomic: 'atomic',
      kv: 'read'}[running] || this.model.lastRequest;
    return known ? `opcode=${known}` : 'size=57-9000';
  }

  start(kind) {
    this.run('start', {kind, size: Number(byId('size').value), count: Number(byId('count').value),
      pause_ms: Number(byId('pause').value)});
  }

  add(rule) { return this.run('fault_add', {rule}); }

  heldRule() {
    return list(this.model.state && this.model.state.rules).find((rule) =>
      text(rule.rule).startsWith('hold'));
  }

  async hold() {
    this.endSlow();
    const rule = this.heldRule();
    if (rule) await this.run('fault_clear', {id: rule.id});
    else await this.add(HOLD_RULE);
  }
  step(count) { return this.run('step', {count}); }

  async slowMotion() {
    clearInterval(this.slowTimer);
    const pause = Number(byId('slow').value);
    if (pause === 0) {
      const rule = this.heldRule();
      if (rule) await this.run('fault_clear', {id: rule.id});
      return;
    }
    if (!this.heldRule()) await this.add(HOLD_RULE);
    this.slowTimer = setInterval(() => this.step(1), pause);
  }
  endSlow() {
    clearInterval(this.slowTimer);
    byId('slow').value = '0';
  }

  draw() {
    const state = this.model.state;
    if (!state) return;
    const rules = list(state.rules);
    const wanted = rules.map((rule) => `${rule.id} ${rule.rule} ${rule.hits}`).join('\n');
    if (wanted !== this.drawnRules) {
      this.drawnRules = wanted;
      this.chips.replaceChildren(...(rules.length ? rules.map((rule) => el('span', {class: 'chip'},
        el('span', {class: 'rule'}, `${number(rule.id)}: ${text(rule.rule)} · ${
          tr(rule.hits === 1 ? '{0} hit' : '{0} hits', number(rule.hits))} `),
        el('button', {type: 'button', 'aria-label': tr('Remove rule {0}', number(rule.id)),
          on: {click: () => this.run('fault_clear', {id: rule.id})}}, '✕')))
        : [el('span', {class: 'dim'}, tr('no rule: every packet arrives'))]));
    }
    // Who may not see packets may not disturb them either.
    const refused = Boolean(text(state.refused));
    for (const each of document.querySelectorAll('#steps button, #steps select, #faults button')) {
      each.disabled = refused;
    }
    const holding = Boolean(this.heldRule());
    byId('hold').setAttribute('aria-pressed', String(holding));
    setWords(byId('hold'), holding ? 'Release all' : 'Hold packets');
    byId('step').disabled = byId('step10').disabled = !holding || refused;
    const transfer = state.transfer || {};
    // The program's last words, without the folder that it is in.
    const output = text(transfer.output).trim().split('\n').pop().replace(/^\/\S*\//, '');
    this.transferState.textContent = transfer.running
      ? tr('running: {0}', text(transfer.kind))
      : [failure(text(transfer.result)), output].filter(Boolean).join(': ');
    this.transferState.title = text(transfer.output);
    this.transferState.classList.toggle('bad', Boolean(transfer.result));
    for (const each of document.querySelectorAll('[data-transfer]')) {
      each.classList.toggle('on', transfer.running && transfer.kind === each.dataset.transfer);
    }
  }
}

// The bar of a recorded run.
export class ReplayBar {
  constructor(place, replay) {
    this.replay = replay;
    this.range = el('input', {type: 'range', min: 0, max: 1000, value: 1000, id: 'time',
      'aria-label': 'Time of the run', on: {input: () => {
        replay.pause();
        replay.seek(replay.begin + replay.length * Number(this.range.value) / 1000);
      }}});
    this.playButton = el('button', {type: 'button', id: 'play', on: {click: () => this.toggle()}},
      'Play');
    this.clock = el('output', {class: 'clock', for: 'time'});
    place.append(group('Replay', button('Begin', 'To the beginning', () => {
      replay.pause();
      replay.seek(replay.begin);
    }), this.playButton,
    el('button', {type: 'button', id: 'replay-back', title: 'One event back',
      on: {click: () => { replay.pause(); replay.back(); }}}, 'Back'),
    el('button', {type: 'button', id: 'replay-step', title: 'One event on',
      on: {click: () => { replay.pause(); replay.step(); }}}, 'Step'),
    select('speed', 'speed', [['0.00001', '1/100000'], ['0.001', '1/1000'], ['0.01', '1/100'],
      ['0.1', '1/10'], ['1', 'as it was'], ['10', '×10']], '1')), this.range, this.clock);
  }
  toggle() {
    if (this.replay.playing) this.replay.pause();
    else this.replay.play(() => Number(byId('speed').value));
  }
  draw() {
    const {replay} = this;
    setWords(this.playButton, replay.playing ? 'Pause' : 'Play');
    this.range.value = String(replay.length ? 1000 * (replay.time - replay.begin) / replay.length : 0);
    this.clock.textContent = tr('{0} s of {1} s', ((replay.time - replay.begin) / 1e9).toFixed(4),
      (replay.length / 1e9).toFixed(3));
  }
}

export function download(name, type, content) {
  const url = URL.createObjectURL(new Blob([content], {type}));
  const link = el('a', {href: url, download: name});
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// The page itself with this run in it.
export async function standalone(model) {
  const run = JSON.stringify(model.recording()).replaceAll('<', '\\u003c');
  const mark = '{"verbena_run":' + 'null}';
  const reply = await fetch('standalone.txt');
  if (!reply.ok) throw new Error(tr('the lab does not answer'));
  const page = await reply.text();
  return page.replace(mark, () => run);
}
