// SPDX-License-Identifier: Apache-2.0
//
// Where a run comes from: the daemon, by server-sent events, or a recording in the page.
import {list, tr} from './text.js';

export class Live {
  constructor(model, onChange, onStatus) {
    this.model = model;
    this.onChange = onChange;
    this.onStatus = onStatus;
    this.paused = false;
    this.connect();
  }

  connect() {
    const source = new EventSource('events');
    source.addEventListener('open', () => this.onStatus('live', 'live'));
    source.addEventListener('error', () => this.onStatus('down',
      source.readyState === EventSource.CLOSED ? 'the lab has ended' : 'connecting …'));
    source.addEventListener('down', (event) =>
      this.onStatus('down', JSON.parse(event.data).reason || 'no daemon'));
    source.addEventListener('gap', () => this.model.addGap());
    source.addEventListener('trace', (event) => {
      if (this.paused) { this.missed = true; return; }
      const message = JSON.parse(event.data);
      if (message.gap || this.missed) this.model.addGap();
      this.missed = false;
      // After a lost connection the last events come again.
      const events = list(message.events);
      const known = this.reconnected ? this.model.now : -1;
      this.model.addEvents(known < 0 ? events : events.filter((each) => each.time_ns > known));
      this.reconnected = false;
      this.onChange();
    });
    source.addEventListener('state', (event) => {
      if (this.paused) return;
      this.model.addState(JSON.parse(event.data));
      this.onStatus('live', 'live');
      this.onChange();
    });
    source.addEventListener('error', () => { this.reconnected = true; });
  }
}

// Gives a command to the lab; an error is a sentence.
export async function command(name, body = {}) {
  let reply;
  try {
    reply = await fetch(`api/${name}`, {method: 'POST', body: JSON.stringify(body),
      headers: {'Content-Type': 'application/json'}});
  } catch {
    throw new Error(tr('the lab does not answer'));
  }
  const answer = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Error(answer.error || `status ${reply.status}`);
  return answer;
}

// A recorded run: time is what the reader makes of it.
export class Replay {
  constructor(model, run, onChange) {
    this.model = model;
    this.onChange = onChange;
    this.events = list(run.events).filter((event) => event && typeof event.time_ns === 'number')
      .sort((a, b) => a.time_ns - b.time_ns);
    this.states = list(run.states).filter((state) => state && typeof state.t === 'number')
      .sort((a, b) => a.t - b.t);
    const times = this.events.map((event) => event.time_ns);
    this.begin = times.length ? times[0] : 0;
    this.end = times.length ? times[times.length - 1] : 0;
    this.recorded = this.states.length > 1;
    this.playing = false;
    this.seek(this.end);
  }

  get length() { return this.end - this.begin; }

  // Nanoseconds of the run in which nothing happens are not waited for.
  static get LONGEST_WAIT_NS() { return 400e6; }

  seek(t) {
    const target = Math.min(this.end, Math.max(this.begin, t));
    if (this.time === undefined || target < this.time) {
      this.model.clear();
      this.model.start = this.begin;
      this.nextEvent = this.nextState = 0;
      this.lastPoint = this.begin;
      // What is known of rules and owners is known from the beginning.
      if (!this.recorded && this.states.length) {
        const mr = list(this.states[0].mr).map((region) => ({...region, bytes: ''}));
        this.model.addState({...this.states[0], t: this.begin, cq: [], srq: [], mr});
        // Where its queues and states ended is not where they were.
        for (const qp of this.model.qps.values()) {
          qp.listed = null;
          qp.state = '';
          qp.visited.clear();
        }
      }
      this.model.points = [];
      this.model.lastCounters = null;
    }
    const pace = Math.max(1e6, this.length / 200);
    const batch = [];
    const flush = () => { if (batch.length) this.model.addEvents(batch.splice(0)); };
    while (true) {
      const event = this.events[this.nextEvent];
      const state = this.recorded ? this.states[this.nextState] : undefined;
      const eventTime = event ? event.time_ns : Infinity;
      const stateTime = state ? state.t : Infinity;
      if (Math.min(eventTime, stateTime) > target) break;
      if (!this.recorded && eventTime - this.lastPoint > pace) {
        flush();
        this.lastPoint = eventTime;
        this.model.sample(eventTime, null);
      }
      if (eventTime <= stateTime) { batch.push(event); ++this.nextEvent; }
      else { flush(); this.model.addState(state); ++this.nextState; }
    }
    flush();
    if (this.model.qps.size === 0 && this.states.length) this.model.addState(this.states[0]);
    this.time = target;
    this.model.now = target;
    ++this.model.version;
    this.onChange();
  }

  step() {
    const event = this.events[this.nextEvent];
    if (event) this.seek(event.time_ns);
  }
  back() {
    let at = this.nextEvent - 1;
    while (at >= 0 && this.events[at].time_ns >= this.time) --at;
    this.seek(at >= 0 ? this.events[at].time_ns : this.begin);
  }

  play(speed) {
    this.playing = true;
    if (this.time >= this.end) this.seek(this.begin);
    let last = performance.now();
    const tick = (now) => {
      if (!this.playing) return;
      const next = this.events[this.nextEvent];
      let to = this.time + (now - last) * 1e6 * speed();
      if (next && next.time_ns - this.time > Replay.LONGEST_WAIT_NS * speed()) to = next.time_ns;
      last = now;
      this.seek(to);
      if (this.time >= this.end) this.pause(); else requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
    this.onChange();
  }
  pause() { this.playing = false; this.onChange(); }
}
