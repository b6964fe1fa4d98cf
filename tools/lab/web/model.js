// SPDX-License-Identifier: Apache-2.0
//
// What is known of a run: QPs, ladder rows, work requests, series for the plots. Fed with the
// daemon's events and states in order of time, live or from a recording.
import {hex, list, number, syndrome, text, tr} from './text.js';

const MOST_ROWS = 24000;
const MOST_EVENTS = 60000;
const MOST_STATES = 2400;
const MOST_REQUESTS = 400;  // of a QP
const MOST_POINTS = 330;  // a minute, five in a second
const PSN_MASK = 0xffffff;
// No two rings have quite the same time.
const LATE_NS = 300e6;

// a - b of 24-bit serial numbers.
export function psnDistance(a, b) {
  const d = (a - b) & PSN_MASK;
  return d > 0x7fffff ? d - 0x1000000 : d;
}

const IS_RESPONSE = /ACKNOWLEDGE|READ_RESPONSE|CNP/;
const ENDS_MESSAGE = /_LAST|_ONLY|READ_REQUEST|CMP_SWAP|FETCH_ADD|ATOMIC_WRITE|FLUSH/;

export class Model {
  constructor() { this.clear(); }

  clear() {
    this.events = [];
    this.states = [];
    this.state = null;
    this.start = 0;      // time of the first event, ns
    this.now = 0;
    this.qps = new Map();
    this.rows = [];      // of the ladder, oldest first
    this.firstRow = 0;   // number of rows[0] since the beginning
    this.flying = new Map();
    this.ruleTexts = new Map();
    this.points = [];
    this.sums = {bytes: 0, packets: 0, again: 0, done: 0};
    this.lastSums = {...this.sums};
    this.lastCounters = null;
    this.lastSample = 0;
    this.peak = 0;       // packets in flight since the last sample
    this.lastRequest = '';  // its class, as rules name it
    this.gaps = 0;
    this.memory = new Map();  // of each process, as it was last seen
    this.touched = [];   // memory that packets named lately
    this.news = [];      // sentences for screen readers
    this.version = 0;
  }

  qp(number, device) {
    let qp = this.qps.get(number);
    if (!qp) {
      qp = {qpn: number, device: device || '', peer: 0, state: '', type: '', comm: '', pid: 0,
        requests: [], toSend: [], open: [], received: 0, posted: 0, completed: 0, errors: 0,
        maxPsn: null, acked: null, visited: new Set(), listed: null, rqPosted: 0, lastSeen: 0};
      this.qps.set(number, qp);
    }
    if (device) qp.device = device;
    return qp;
  }

  // Both ends of a connection have the same name.
  pairOf(qpn) {
    const qp = this.qps.get(qpn);
    const peer = qp ? qp.peer : 0;
    return peer ? `${Math.min(qpn, peer)}-${Math.max(qpn, peer)}` : `${qpn}`;
  }

  addGap() {
    ++this.gaps;
    this.addRow({type: 'gap', t: this.now, qpn: 0});
    for (const qp of this.qps.values()) {
      qp.maxPsn = qp.acked = null;
      qp.toSend = [];
      qp.open = [];
    }
  }

  addEvents(events) {
    for (const event of events) {
      if (!event || typeof event.time_ns !== 'number') continue;
      if (typeof event.device !== 'string') event.device = '';
      this.events.push(event);
      this.addEvent(event);
    }
    if (this.events.length > MOST_EVENTS) {
      this.events.splice(0, this.events.length - MOST_EVENTS * 0.8);
    }
    ++this.version;
  }

  addEvent(event) {
    const t = event.time_ns;
    if (this.start === 0) this.start = t;
    this.now = Math.max(this.now, t);
    const qpn = number(event.qpn);
    switch (event.event) {
      case 'sent': return this.sent(event, t, qpn);
      case 'received': return this.received(event, t, qpn);
      case 'refused': return this.refused(event, t, qpn);
      case 'fault': return this.fault(event, t, qpn);
      case 'posted': return this.posted(event, t, qpn);
      case 'completion': return this.completion(event, t, qpn);
      case 'state': return this.stateChange(event, t, qpn);
      case 'timer':
        this.addNote(t, qpn, event.device, 'timer', 'timer ran out');
        this.say(tr('A timer ran out: packets are sent again.'));
        return;
      case 'async_event':
        this.addNote(t, qpn, event.device, 'bad', `event ${text(event.type)}`);
        return;
      default:
    }
  }

  addRow(row) {
    row.pair = row.qpn ? this.pairOf(row.qpn) : '';
    this.rows.push(row);
    if (this.rows.length > MOST_ROWS) {
      const cut = MOST_ROWS / 5;
      this.rows.splice(0, cut);
      this.firstRow += cut;
    }
    return row;
  }

  addNote(t, qpn, device, kind, words) {
    const qp = this.qp(qpn, device);
    return this.addRow({type: 'note', t, qpn, device: qp.device, kind, text: words});
  }

  say(sentence) {
    this.news.push(sentence);
    if (this.news.length > 50) this.news.shift();
  }

  sent(event, t, qpn) {
    const qp = this.qp(qpn, event.device);
    const to = number(event.peer_qpn);
    if (to && !qp.peer) qp.peer = to;
    qp.lastSeen = t;
    const aeth = syndrome(event);
    const row = this.addRow({type: 'packet', t, qpn, to, device: qp.device,
      opcode: text(event.opcode), psn: number(event.psn), bytes: number(event.bytes),
      again: event.retransmission === true, aeth, msn: event.msn, address: event.address,
      rkey: event.rkey, ackReq: event.ack_req === true, fate: 'flying', arrived: 0, copies: 0,
      rules: [], reason: ''});
    if (row.opcode.startsWith('CNP')) row.again = false;
    const key = `${to}:${row.psn}:${row.opcode}`;
    const waiting = this.flying.get(key);
    if (waiting) waiting.push(row); else this.flying.set(key, [row]);
    if (this.flying.size > 20000) this.flying.clear();
    this.sums.bytes += row.bytes;
    ++this.sums.packets;
    if (row.again) ++this.sums.again;
    if (aeth && aeth.kind !== 'ack') this.say(`${aeth.text}, PSN ${row.psn}.`);
    if (row.again) this.say(tr('PSN {0} is sent again.', row.psn));
    if (typeof row.address === 'number') {
      this.touched.push({t, rkey: row.rkey, address: row.address, opcode: row.opcode,
        bytes: row.bytes});
      if (this.touched.length > 40) this.touched.shift();
    }
    if (IS_RESPONSE.test(row.opcode)) return;
    this.lastRequest = /SEND/.test(row.opcode) ? 'send' : /READ/.test(row.opcode) ? 'read'
      : /WRITE/.test(row.opcode) ? 'write' : 'atomic';
    this.peak = Math.max(this.peak, this.inFlight(qp, row.opcode));
    if (row.again) {
      for (const wr of qp.requests) {
        if (wr.psn !== null && psnDistance(row.psn, wr.psn) >= 0 &&
            psnDistance(wr.lastPsn, row.psn) >= 0 && wr.done === null) wr.again.push(t);
      }
      return;
    }
    if (qp.acked === null) qp.acked = (row.psn - 1) & PSN_MASK;
    if (qp.maxPsn === null || psnDistance(row.psn, qp.maxPsn) > 0) qp.maxPsn = row.psn;
    this.peak = Math.max(this.peak, this.inFlight(qp, row.opcode));
    const wr = qp.toSend[0];
    if (!wr) return;
    if (wr.psn === null) { wr.psn = row.psn; wr.sent = t; }
    wr.lastPsn = row.psn;
    wr.lastSent = t;
    ++wr.packets;
    if (ENDS_MESSAGE.test(row.opcode)) qp.toSend.shift();
  }

  // The oldest packet of that kind which has not arrived; else the last one that has. One that a
  // rule has dropped does not arrive; of a rule that is not known yet the next one is preferred.
  takeFlying(to, event) {
    const key = `${to}:${number(event.psn)}:${text(event.opcode)}`;
    const waiting = this.flying.get(key);
    if (!waiting || waiting.length === 0) return null;
    const flying = waiting.filter((each) => each.fate === 'flying');
    return flying.find((each) => each.rules.every(({id}) => {
      const action = this.actionOf(id);
      return action && action !== 'drop' && action !== 'down';
    })) || flying.find((each) => each.rules.every(({id}) => !this.actionOf(id))) || flying[0] ||
      waiting[waiting.length - 1];
  }

  received(event, t, qpn) {
    const qp = this.qp(qpn, event.device);
    qp.lastSeen = t;
    let row = this.takeFlying(qpn, event);
    if (row && row.fate === 'arrived') {
      ++row.copies;
    } else if (row && row.fate === 'flying') {
      row.fate = 'arrived';
      row.arrived = t;
      if (!qp.peer) qp.peer = row.qpn;
    } else {
      row = this.addRow({type: 'packet', t, qpn: qpn, to: qpn, device: qp.device, outside: true,
        opcode: text(event.opcode), psn: number(event.psn), bytes: number(event.bytes),
        again: event.retransmission === true, aeth: syndrome(event), msn: event.msn,
        address: event.address, rkey: event.rkey, ackReq: event.ack_req === true,
        fate: 'arrived', arrived: t, copies: 0, rules: [], reason: ''});
    }
    const aeth = syndrome(event);
    if (!aeth) return;
    const psn = number(event.psn);
    if (aeth.kind === 'ack' && (qp.acked === null || psnDistance(psn, qp.acked) > 0)) qp.acked = psn;
    // The first of several responses answers what was before its READ; the last one the READ.
    const upTo = /READ_RESPONSE_FIRST/.test(row.opcode) ? psn - 1 : psn;
    for (const wr of qp.requests) {
      if (wr.acked !== null || wr.psn === null) continue;
      if (aeth.kind === 'ack' && psnDistance(upTo, wr.lastPsn) >= 0) wr.acked = t;
      if (aeth.kind !== 'ack' && wr.done === null && psnDistance(psn, wr.psn) >= 0 &&
          psnDistance(wr.lastPsn, psn) >= 0) wr.naks.push(t);
    }
  }

  refused(event, t, qpn) {
    const reason = text(event.reason, '?');
    let row = this.takeFlying(qpn, event);
    if (!row) {
      row = this.addRow({type: 'packet', t, qpn, to: qpn, device: text(event.device), outside: true,
        opcode: text(event.opcode), psn: number(event.psn), bytes: number(event.bytes), again: false,
        aeth: syndrome(event), fate: 'flying', copies: 0, rules: [], reason: ''});
    }
    row.fate = 'refused';
    row.arrived = t;
    row.reason = reason;
    this.say(tr('PSN {0} was refused: {1}.', row.psn, reason));
  }

  fault(event, t, qpn) {
    const rule = number(event.rule);
    // The packet that has just left.
    let row = (this.flying.get(`${number(event.peer_qpn)}:${number(event.psn)}:${
      text(event.opcode)}`) || []).at(-1);
    if (!row) {
      row = this.addRow({type: 'packet', t, qpn: qpn || number(event.peer_qpn),
        to: number(event.peer_qpn), device: text(event.device), outside: qpn === 0,
        opcode: text(event.opcode), psn: number(event.psn), bytes: number(event.bytes),
        again: event.retransmission === true, aeth: null, fate: 'flying', copies: 0, rules: [],
        reason: ''});
    }
    row.rules.push({id: rule, t, side: text(event.side)});
    this.say(tr('Rule {0} hits PSN {1}.', rule, row.psn));
  }

  // What a rule does: "drop"; "" if it is not known.
  actionOf(rule) { return (this.ruleTexts.get(rule) || '').split(' ')[0]; }

  fateOf(row) {
    if (row.fate !== 'flying') return row.fate;
    for (const {id} of row.rules) {
      const action = this.actionOf(id);
      if (action === 'drop' || action === 'down') return 'lost';
      if (action === 'hold') return 'held';
    }
    return this.now - row.t > LATE_NS ? (row.rules.length ? 'lost' : 'away') : 'flying';
  }

  posted(event, t, qpn) {
    const qp = this.qp(qpn, event.device);
    const wr = {id: text(event.wr_id, String(event.wr_id)), opcode: text(event.opcode),
      bytes: number(event.bytes), posted: t, sent: null, lastSent: null, acked: null, done: null,
      status: '', psn: null, lastPsn: null, packets: 0, again: [], naks: [], qpn};
    ++qp.posted;
    qp.requests.push(wr);
    qp.toSend.push(wr);
    qp.open.push(wr);
    for (const each of [qp.requests, qp.toSend, qp.open]) {
      if (each.length > MOST_REQUESTS) each.splice(0, each.length - MOST_REQUESTS);
    }
    this.addNote(t, qpn, event.device, 'post',
      `post ${wr.opcode}, ${wr.bytes} B, wr_id ${shortId(wr.id)}`);
  }

  completion(event, t, qpn) {
    const qp = this.qp(qpn, event.device);
    const id = text(event.wr_id, String(event.wr_id));
    const status = text(event.status);
    const good = status === 'SUCCESS';
    if (event.queue === 'send') {
      const at = qp.open.findIndex((wr) => wr.id === id);
      for (const wr of qp.open.splice(0, at < 0 ? 1 : at + 1)) {
        wr.done = t;
        wr.status = wr.id === id ? status : 'SUCCESS';
        ++qp.completed;
        const unsent = qp.toSend.indexOf(wr);
        if (unsent >= 0) qp.toSend.splice(unsent, 1);
      }
      ++this.sums.done;
    } else {
      ++qp.received;
    }
    if (!good) ++qp.errors;
    this.addNote(t, qpn, event.device, good ? 'done' : 'bad',
      `CQE ${text(event.opcode)} ${status}, wr_id ${shortId(id)}`);
    if (!good) this.say(tr('Completion with {0}.', status));
  }

  stateChange(event, t, qpn) {
    const qp = this.qp(qpn, event.device);
    qp.state = text(event.to);
    qp.lastSeen = t;
    if (qp.state === 'RESET' || qp.state === 'INIT') {
      qp.visited = new Set();
      qp.maxPsn = qp.acked = null;
      qp.toSend = [];
      qp.open = [];
    }
    qp.visited.add(text(event.from));
    qp.visited.add(qp.state);
    this.addNote(t, qpn, event.device, qp.state === 'ERR' || qp.state === 'SQE' ? 'bad' : 'state',
      `${text(event.from)} → ${qp.state}`);
    this.say(tr('QP {0} is in {1}.', hex(qpn), qp.state));
  }

  // In flight as the PSNs say it.
  inFlight(qp, opcode = 'RC') {
    if (qp.maxPsn === null || qp.acked === null || !/^X?RC/.test(opcode)) return 0;
    return Math.max(0, psnDistance(qp.maxPsn, qp.acked));
  }

  addState(state) {
    if (!state || typeof state.t !== 'number') return;
    this.states.push(state);
    if (this.states.length > MOST_STATES) this.states.splice(0, MOST_STATES / 5);
    const same = number(state.same_until);
    if (this.state && same > this.lastSample) this.sample(same, this.state.counters);
    this.state = state;
    for (const rule of list(state.rules).filter(Boolean)) this.ruleTexts.set(number(rule.id), text(rule.rule));
    const listed = new Set();
    for (const item of list(state.qp)) {
      if (!item || typeof item !== 'object') continue;
      const qp = this.qp(number(item.qpn), text(item.device));
      listed.add(qp.qpn);
      qp.listed = item;
      qp.rqPosted = number(item.rq_posted);
      qp.state = text(item.state, qp.state);
      qp.visited.add(qp.state);
      qp.type = text(item.type);
      qp.comm = text(item.comm);
      qp.pid = number(item.pid);
      if (number(item.dest_qpn) && (qp.state === 'RTR' || qp.state === 'RTS')) {
        qp.peer = number(item.dest_qpn);
      }
    }
    const regions = new Map();
    for (const region of list(state.mr).filter(Boolean)) {
      if (!regions.has(region.pid)) regions.set(region.pid, []);
      regions.get(region.pid).push(region);
    }
    for (const [pid, its] of regions) this.memory.set(pid, its);
    if (this.memory.size > 200) this.memory = regions;
    for (const qp of this.qps.values()) {
      if (qp.listed && !listed.has(qp.qpn)) { qp.listed = null; qp.gone = true; }
    }
    this.now = Math.max(this.now, state.t);
    this.sample(state.t, state.counters);
    ++this.version;
  }

  // A point of the plots. Counters, where there are any, also count what the page was not shown.
  sample(t, counters) {
    const seconds = (t - this.lastSample) / 1e9;
    if (this.lastSample !== 0 && seconds < 0.02) return;
    let bytes = this.sums.bytes - this.lastSums.bytes;
    let packets = this.sums.packets - this.lastSums.packets;
    const again = this.sums.again - this.lastSums.again;
    if (counters) {
      const now = {words: 0, packets: 0};
      for (const device of Object.values(counters)) {
        const port = (device && device.counters) || {};
        now.words += number(port.port_xmit_data);
        now.packets += number(port.port_xmit_packets);
      }
      if (this.lastCounters) {
        bytes = (now.words - this.lastCounters.words) * 4;
        packets = now.packets - this.lastCounters.packets;
      }
      this.lastCounters = now;
    }
    let inFlight = this.peak;
    this.peak = 0;
    if (counters) {
      let listed = 0;
      for (const qp of this.qps.values()) listed += qp.listed ? number(qp.listed.outstanding) : 0;
      inFlight = Math.max(inFlight, listed);
    }
    if (this.lastSample !== 0) {
      this.points.push({t, bytes: Math.max(0, bytes) / seconds,
        packets: Math.max(0, packets) / seconds, again, inFlight});
      if (this.points.length > MOST_POINTS) this.points.shift();
    }
    this.lastSample = t;
    this.lastSums = {...this.sums};
  }

  // QPs worth showing: those that exist, else those of the recording.
  shownQps(filter) {
    let qps = [...this.qps.values()].filter((qp) => qp.device);
    const living = qps.filter((qp) => qp.listed);
    if (living.length > 0) {
      qps = living;
    } else if (!filter && qps.length > 0) {
      // What has ended: the last one's two programs.
      const last = qps.reduce((a, b) => (b.lastSeen > a.lastSeen ? b : a));
      const peer = this.qps.get(last.peer);
      const pids = [last.pid, peer ? peer.pid : 0];
      if (last.pid) qps = qps.filter((qp) => pids.includes(qp.pid));
    }
    if (filter) qps = qps.filter((qp) => this.pairOf(qp.qpn) === filter);
    return qps.sort((a, b) => b.lastSeen - a.lastSeen || a.qpn - b.qpn);
  }

  devices() {
    const names = new Set();
    const status = this.state && this.state.status;
    for (const nic of list(status && status.nics).filter(Boolean)) names.add(text(nic.device));
    for (const qp of this.qps.values()) if (qp.device) names.add(qp.device);
    return [...names].sort((a, b) => a.localeCompare(b, 'en', {numeric: true}));
  }

  // 0: left, 1: right.
  laneOf(qpn) {
    const qp = this.qps.get(qpn);
    const peer = qp && this.qps.get(qp.peer);
    if (!peer || peer === qp) {
      return qp && this.devices().indexOf(qp.device) > 0 ? 1 : 0;
    }
    const order = qp.device === peer.device ? qp.qpn - peer.qpn
      : qp.device.localeCompare(peer.device, 'en', {numeric: true});
    return order > 0 ? 1 : 0;
  }

  recording() {
    // States are many and large: some are enough for a replay.
    const step = Math.max(1, Math.ceil(this.states.length / 600));
    const states = this.states.filter((_, i) =>
      i % step === 0 || i === this.states.length - 1);
    return {version: 1, states, events: this.events};
  }
}

// wr_ids are often addresses.
export function shortId(id) {
  return id.length > 9 && /^\d+$/.test(id) ? '0x' + BigInt(id).toString(16) : id;
}
