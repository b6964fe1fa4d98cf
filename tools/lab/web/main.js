// SPDX-License-Identifier: Apache-2.0
//
// Puts the page together.
import {byId, chooseLanguage, el, hex, localize, setWords, text, tr} from './text.js';
import {Model} from './model.js';
import {Ladder} from './ladder.js';
import {Hosts, stateMachine} from './hosts.js';
import {plots, requestTimeline} from './charts.js';
import {Live, Replay} from './source.js';
import {Controls, ReplayBar, download, standalone} from './controls.js';

const SLOW_PARTS_MS = 200;

function theme() {
  const wanted = new URLSearchParams(location.search).get('theme');
  const choose = (name) => {
    document.documentElement.dataset.theme = name;
    setWords(byId('theme'), name === 'dark' ? 'Light' : 'Dark');
  };
  const system = matchMedia('(prefers-color-scheme: dark)');
  choose(wanted === 'dark' || wanted === 'light' ? wanted : system.matches ? 'dark' : 'light');
  byId('theme').addEventListener('click', () =>
    choose(document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark'));
}

class Page {
  constructor(run) {
    this.model = new Model();
    this.ladder = new Ladder(this.model, byId('ladder'), byId('details'));
    this.hosts = new Hosts(this.model, byId('left'), byId('right'));
    this.filter = '';
    this.pairs = '';
    this.version = -1;
    this.slowDrawn = 0;
    this.newsTold = 0;
    const change = () => this.wantDrawing();
    byId('filter').addEventListener('change', () => this.setFilter(byId('filter').value));
    byId('notes').addEventListener('change', () => {
      this.ladder.withNotes = byId('notes').checked;
      this.ladder.reset();
    });
    byId('follow').addEventListener('change', () => {
      this.ladder.follow = byId('follow').checked;
      this.ladder.draw();
    });
    this.ladder.onFollow = (follow) => { byId('follow').checked = follow; };
    byId('export-svg').addEventListener('click', () =>
      download('ladder.svg', 'image/svg+xml', this.ladder.exportSvg()));
    new ResizeObserver(() => this.ladder.draw()).observe(byId('ladder'));
    if (run) this.startReplay(run, change); else this.startLive(change);
    document.addEventListener('keydown', (event) => this.key(event));
    byId('language').addEventListener('click', () => this.setLanguage(
      document.documentElement.lang === 'en' ? 'zh' : 'en'));
    this.setLanguage(chooseLanguage());
  }

  // Everything again in that language.
  setLanguage(name) {
    chooseLanguage(name);
    localize(document.body);
    // The name of the other language, in that language.
    byId('language').textContent = name === 'en' ? '中文' : 'English';
    byId('language').lang = name === 'en' ? 'zh-CN' : 'en';
    if (this.controls) this.controls.words();
    this.pairs = '';
    this.drawEmpty();
    this.ladder.draw();
    this.ladder.describe();
    this.version = -1;
    this.slowDrawn = 0;
    this.wantDrawing();
  }

  // Why there is nothing to see.
  drawEmpty() {
    const refused = Boolean(text(this.model.state && this.model.state.refused));
    byId('notice').hidden = !refused;
    if (refused) {
      const words = tr('You see only the queues and memory of your own programs. This daemon serves ' +
        'the whole machine: its packets, counters and faults are shown to root, to its own user and ' +
        'to members of its group (verbena up --system --group). Ask to become a member, or look ' +
        'at a daemon of your own: verbena lab --name mine.');
      if (byId('notice').textContent !== words) byId('notice').textContent = words;
    }
    const words = this.replay ? '' : refused ? tr('Packets are not shown to you: see above.')
      : tr('Nothing has been sent yet.') + '\n' +
        tr('Start a transfer above, or run any RDMA program:') + '\nverbena run -- ib_write_bw -d verbena0';
    if (this.ladder.emptyWords === words) return;
    this.ladder.emptyWords = words;
    this.ladder.draw();
  }

  startReplay(run, change) {
    document.body.classList.add('replaying');
    for (const id of ['pause', 'clear', 'export-run']) byId(id).hidden = true;
    byId('steps').hidden = byId('faults').hidden = true;
    this.setStatus('recorded', 'recorded run');
    let first = true;
    this.replay = new Replay(this.model, run, () => {
      // Back in time: other rows.
      if (this.ladder.seen > this.model.firstRow + this.model.rows.length) this.ladder.reset();
      if (!first) change();
    });
    first = false;
    this.bar = new ReplayBar(byId('transfers'), this.replay);
    this.ladder.reset();
    change();
  }

  startLive(change) {
    this.controls = new Controls(this.model, {transfers: byId('transfers'), steps: byId('steps'), faults: byId('faults')},
      (sentence, bad) => this.tell(sentence, bad));
    this.live = new Live(this.model, change, (kind, words) => this.setStatus(kind, words));
    byId('pause').addEventListener('click', () => {
      this.live.paused = !this.live.paused;
      setWords(byId('pause'), this.live.paused ? 'Go on' : 'Freeze');
      byId('pause').setAttribute('aria-pressed', String(this.live.paused));
    });
    byId('clear').addEventListener('click', () => {
      // What there is now stays known.
      const {state} = this.model;
      this.model.clear();
      this.model.addState(state);
      this.ladder.reset();
      change();
    });
    byId('export-run').addEventListener('click', async () => {
      try {
        download('run.html', 'text/html', await standalone(this.model));
      } catch (error) {
        this.tell(error.message, true);
      }
    });
  }

  key(event) {
    if (event.target.closest('input, select, textarea') || event.ctrlKey || event.metaKey ||
        event.altKey) {
      return;
    }
    if (event.key === 's') {
      if (this.replay) this.replay.step();
      else if (!byId('step').disabled) this.controls.step(1);
    }
    if (event.key === ' ' && this.bar && event.target === document.body) {
      event.preventDefault();
      this.bar.toggle();
    }
  }

  setFilter(filter) {
    this.filter = this.ladder.filter = this.hosts.filter = filter;
    this.ladder.reset();
    this.version = -1;
    this.slowDrawn = 0;
    this.wantDrawing();
  }

  // `words` in English.
  setStatus(kind, words) {
    byId('status').className = `status ${kind}`;
    setWords(byId('status-text'), words);
  }

  tell(sentence, bad) {
    byId('message').textContent = sentence;
    byId('message').classList.toggle('bad', Boolean(bad));
  }

  wantDrawing() {
    if (this.wanted) return;
    this.wanted = true;
    requestAnimationFrame((now) => {
      this.wanted = false;
      this.draw(now);
    });
  }

  draw(now) {
    if (this.version === this.model.version) {
      if (this.bar) this.bar.draw();
      return;
    }
    this.version = this.model.version;
    this.ladder.update();
    const names = this.ladder.laneNames();
    byId('lane-left').textContent = names[0];
    byId('lane-right').textContent = names[1];
    if (this.bar) this.bar.draw();
    if (this.controls) this.controls.draw();
    // These change size and make rubbish: not for each packet.
    if (now - this.slowDrawn < SLOW_PARTS_MS) {
      if (!this.later) {
        this.later = setTimeout(() => {
          this.later = 0;
          this.version = -1;
          this.wantDrawing();
        }, SLOW_PARTS_MS);
      }
      return;
    }
    this.slowDrawn = now;
    this.hosts.draw();
    this.drawPairs();
    const qps = this.chosenQps();
    byId('machine').replaceChildren(stateMachine(qps));
    byId('machine-names').replaceChildren(...qps.slice(0, 2).map((qp) =>
      el('span', {class: qp.state === 'ERR' ? 'bad' : ''},
        `${qp.device} ${hex(qp.qpn)}: ${qp.state || '?'}`)));
    byId('requests').replaceChildren(requestTimeline(this.filter
      ? this.model.shownQps(this.filter) : [...this.model.qps.values()], this.model.now));
    byId('plots').replaceChildren(...plots(this.model.points, !this.replay));
    const {packets, again, done} = this.model.sums;
    byId('packets').textContent = [tr('packets: {0}', packets), tr('sent again: {0}', again),
      tr('work requests done: {0}', done)].join(' · ');
    this.drawEmpty();
    this.tellNews();
  }

  chosenQps() {
    const qps = this.model.shownQps(this.filter);
    if (this.filter || qps.length === 0) return qps.sort((a, b) =>
      this.model.laneOf(a.qpn) - this.model.laneOf(b.qpn));
    const pair = this.model.pairOf(qps[0].qpn);
    return qps.filter((qp) => this.model.pairOf(qp.qpn) === pair).sort((a, b) =>
      this.model.laneOf(a.qpn) - this.model.laneOf(b.qpn));
  }

  drawPairs() {
    const pairs = new Map();
    const recent = [...this.model.qps.values()].filter((qp) => qp.device)
      .sort((a, b) => b.lastSeen - a.lastSeen).slice(0, 60);
    for (const qp of recent) {
      const pair = this.model.pairOf(qp.qpn);
      if (pairs.has(pair)) continue;
      const peer = this.model.qps.get(qp.peer);
      const ends = [qp, peer].filter((each) => each && each.device)
        .sort((a, b) => this.model.laneOf(a.qpn) - this.model.laneOf(b.qpn))
        .map((each) => `${each.device} ${hex(each.qpn)}`);
      pairs.set(pair, `${ends.join(' ↔ ')}${qp.comm ? ` · ${qp.comm}` : ''}`);
    }
    if (this.filter && !pairs.has(this.filter)) pairs.set(this.filter, this.filter);
    const wanted = JSON.stringify([...pairs]);
    if (wanted === this.pairs || document.activeElement === byId('filter')) return;
    this.pairs = wanted;
    byId('filter').replaceChildren(el('option', {value: ''}, tr('all queue pairs')),
      ...[...pairs].map(([value, name]) => el('option', {value}, name)));
    byId('filter').value = this.filter;
  }

  // At most a few sentences at a time for those who listen.
  tellNews() {
    const news = this.model.news.splice(0).slice(-3);
    if (news.length && !this.replay?.playing) byId('news').textContent = news.join(' ');
  }
}

function start() {
  chooseLanguage();
  theme();
  let run = null;
  const element = byId('run');
  if (element) {
    try {
      run = JSON.parse(element.textContent);
    } catch {
      run = {};
    }
    if (!run || run.version !== 1) {
      byId('status-text').textContent = tr('there is no run in this page');
      run = {version: 1, events: [], states: []};
    }
  }
  window.verbenaLab = new Page(run);
}

start();
