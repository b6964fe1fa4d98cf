// SPDX-License-Identifier: Apache-2.0
//
// The packet ladder: a row for each packet and for what happens at its ends. Only the rows that
// can be seen are elements, so that many thousands cost nothing.
import {bytesText, el, hex, meaning, opcodeText, svg, timeText, tr} from './text.js';

const ROW_REM = 2.1;
const MARGIN_ROWS = 4;

export class Ladder {
  constructor(model, viewport, details) {
    this.model = model;
    this.viewport = viewport;
    this.details = details;
    this.filter = '';
    this.withNotes = true;
    this.follow = true;
    this.selected = null;
    this.shown = [];        // rows that pass the filter
    this.seen = 0;          // rows looked at, counted since the beginning
    this.space = el('div', {class: 'ladder-space'});
    this.picture = svg('svg', {class: 'ladder-picture', role: 'img',
      'aria-label': 'Packet ladder; the list of what is selected is below it'});
    this.space.append(this.picture);
    this.emptyWords = '';  // what an empty ladder says
    viewport.append(this.space);
    viewport.addEventListener('scroll', () => {
      const atEnd = viewport.scrollTop + viewport.clientHeight >= viewport.scrollHeight - 4;
      if (!this.scrolling) this.setFollow(atEnd);
      this.scrolling = false;
      this.draw();
    }, {passive: true});
    viewport.addEventListener('keydown', (event) => this.key(event));
    this.onFollow = () => {};
  }

  setFollow(follow) {
    if (this.follow === follow) return;
    this.follow = follow;
    this.onFollow(follow);
  }

  // Everything anew: another filter, another run.
  reset() {
    this.shown = [];
    this.seen = 0;
    this.selected = null;
    this.lastFirst = 0;
    this.update();
    this.describe();
  }

  passes(row) {
    if (row.type === 'gap') return true;
    if (row.type === 'note' && !this.withNotes) return false;
    return !this.filter || this.model.pairOf(row.qpn) === this.filter;
  }

  update() {
    const {rows, firstRow} = this.model;
    if (this.lastFirst !== firstRow) {
      // Rows at the beginning were forgotten.
      const alive = new Set(rows);
      this.shown = this.shown.filter((row) => alive.has(row));
      this.lastFirst = firstRow;
    }
    for (let i = Math.max(0, this.seen - firstRow); i < rows.length; ++i) {
      if (this.passes(rows[i])) this.shown.push(rows[i]);
    }
    this.seen = firstRow + rows.length;
    this.draw();
  }

  rowHeight() {
    if (!this.rem) this.rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
    return Math.round(this.rem * ROW_REM);
  }

  geometry(width) {
    const rem = this.rem || 16;
    const time = rem * 5.6;
    return {width, left: time + rem * 1.2, right: width - rem * 2, time};
  }

  draw() {
    this.rem = 0;
    const height = this.rowHeight();
    const width = this.viewport.clientWidth;
    const total = Math.max(this.shown.length * height + height / 2, this.viewport.clientHeight - 2);
    this.space.style.height = `${total}px`;
    if (this.follow) {
      const end = total - this.viewport.clientHeight;
      if (Math.abs(this.viewport.scrollTop - end) > 1 && end > 0) {
        this.scrolling = true;
        this.viewport.scrollTop = end;
      }
    }
    const top = this.viewport.scrollTop;
    const first = Math.max(0, Math.floor(top / height) - MARGIN_ROWS);
    const last = Math.min(this.shown.length,
      Math.ceil((top + this.viewport.clientHeight) / height) + MARGIN_ROWS);
    const place = this.geometry(width);
    const pictureHeight = Math.max((last - first) * height + height / 2,
      this.viewport.clientHeight - 2);
    this.picture.setAttribute('width', width);
    this.picture.setAttribute('height', pictureHeight);
    this.picture.style.top = `${first * height}px`;
    const parts = [this.lifelines(place, pictureHeight)];
    for (let i = first; i < last; ++i) {
      parts.push(this.row(this.shown[i], (i - first) * height, height, place, i));
    }
    if (this.shown.length === 0 && this.emptyWords) {
      parts.push(...this.emptyWords.split('\n').map((line, i) => svg('text', {class: 'gap',
        x: (place.left + place.right) / 2, y: height * (2 + 0.75 * i)}, line)));
    }
    this.picture.replaceChildren(...parts);
  }

  lifelines(place, height) {
    return svg('g', {class: 'lifelines'},
      [place.left, place.right].map((x) => svg('line', {x1: x, y1: 0, x2: x, y2: height})));
  }

  row(row, y, height, place, index) {
    const middle = y + height / 2;
    const children = [];
    if (row.type !== 'gap') {
      children.push(svg('text', {x: place.time, y: middle + height * 0.16, class: 'time'},
        (Math.max(0, row.t - this.model.start) / 1e9).toFixed(6)));
    }
    if (row.type === 'gap') {
      children.push(svg('text', {x: (place.left + place.right) / 2, y: middle + height * 0.16,
        class: 'gap'}, tr('⋯ more happened here than the page is shown ⋯')));
    } else if (row.type === 'note') {
      children.push(...this.note(row, middle, height, place));
    } else {
      children.push(...this.packet(row, y, height, place));
    }
    const selected = row === this.selected;
    return svg('g', {class: `row ${row.type}${selected ? ' selected' : ''}`, 'data-row': index,
      on: {click: () => this.select(row)}},
      svg('rect', {class: 'hit', x: 0, y: y + 1, width: place.width, height: height - 2}), children);
  }

  note(row, middle, height, place) {
    const right = this.model.laneOf(row.qpn) === 1;
    const x = right ? place.right : place.left;
    const side = right ? -1 : 1;
    return [
      svg('circle', {cx: x, cy: middle, r: height * 0.13, class: `dot ${row.kind}`}),
      svg('text', {x: x + side * height * 0.35, y: middle + height * 0.16,
        class: `note ${row.kind} ${right ? 'end' : 'begin'}`}, tr(row.text)),
    ];
  }

  classOf(row, fate) {
    const classes = ['arrow'];
    if (row.aeth && row.aeth.kind !== 'ack') classes.push('nak');
    else if (/ACKNOWLEDGE/.test(row.opcode)) classes.push('ack');
    else if (/READ_RESPONSE/.test(row.opcode)) classes.push('response');
    else classes.push('request');
    if (row.again) classes.push('again');
    classes.push(fate);
    return classes.join(' ');
  }

  label(row, fate) {
    const parts = [opcodeText(row.opcode)];
    if (row.aeth && row.aeth.kind !== 'ack') parts[0] = row.aeth.text;
    parts.push(`PSN ${row.psn}`);
    if (row.bytes > 0) parts.push(bytesText(row.bytes));
    let label = parts.join(' · ');
    if (row.again) label = `↻ ${tr('again: {0}', label)}`;
    const rules = row.rules.map(({id}) => `${tr('rule {0}', id)} ${this.model.actionOf(id)}`.trim());
    if (fate === 'lost') label += ` ✗ ${tr('lost')}${rules.length ? ` (${rules[0]})` : ''}`;
    else if (fate === 'held') label += ` ‖ ${tr('held')}`;
    else if (fate === 'refused') label += ` ✗ ${tr('refused: {0}', row.reason)}`;
    else if (fate === 'away') label += ` ${tr('(left, not seen to arrive)')}`;
    else if (rules.length) label += ` (${rules[0]})`;
    if (row.copies) label += ` ×${row.copies + 1}`;
    return label;
  }

  packet(row, y, height, place) {
    const fate = this.model.fateOf(row);
    let from = this.model.laneOf(row.qpn);
    if (row.outside) from = 1 - from;
    const x1 = from === 0 ? place.left : place.right;
    const x2 = from === 0 ? place.right : place.left;
    const y1 = y + height * 0.62, y2 = y + height * 0.88;
    const way = {lost: 0.62, held: 0.5, flying: 0.8}[fate] || 1;
    const ex = x1 + (x2 - x1) * way, ey = y1 + (y2 - y1) * way;
    const classes = this.classOf(row, fate);
    const head = height * 0.17;
    const back = x2 > x1 ? -1 : 1;
    const parts = [svg('line', {x1, y1, x2: ex, y2: ey, class: classes})];
    if (fate === 'lost' || fate === 'refused') {
      const r = head;
      parts.push(svg('path', {class: 'cross',
        d: `M${ex - r} ${ey - r}L${ex + r} ${ey + r}M${ex - r} ${ey + r}L${ex + r} ${ey - r}`}));
    } else {
      parts.push(svg('path', {class: `head ${classes}`,
        d: `M${ex} ${ey}L${ex + back * head * 1.6} ${ey - head}L${ex + back * head * 1.6} ${
          ey + head}Z`}));
    }
    parts.push(svg('text', {x: (place.left + place.right) / 2, y: y + height * 0.5,
      class: `label ${classes}`}, this.label(row, fate)));
    return parts;
  }

  select(row) {
    this.selected = row;
    this.draw();
    this.describe();
  }

  key(event) {
    const step = {ArrowDown: 1, ArrowUp: -1, j: 1, k: -1}[event.key];
    if (!step || this.shown.length === 0) return;
    event.preventDefault();
    let at = this.selected ? this.shown.indexOf(this.selected) : -1;
    if (at < 0) at = step > 0 ? -1 : this.shown.length;
    at = Math.min(this.shown.length - 1, Math.max(0, at + step));
    this.setFollow(at === this.shown.length - 1);
    const height = this.rowHeight();
    const {scrollTop, clientHeight} = this.viewport;
    if (at * height < scrollTop) this.viewport.scrollTop = at * height;
    if ((at + 1) * height > scrollTop + clientHeight) {
      this.viewport.scrollTop = (at + 1) * height - clientHeight;
    }
    this.select(this.shown[at]);
  }

  describe() {
    const row = this.selected;
    if (!row) {
      this.details.replaceChildren(el('span', {class: 'dim'},
        tr('Choose a row (click, or ↑ ↓ in the ladder) to read what it is.')));
      return;
    }
    if (row.type !== 'packet') {
      this.details.replaceChildren(el('strong', {}, row.type === 'gap' ? tr('A gap') : tr(row.text)),
        el('span', {}, row.qpn ? ` — ${tr('QP {0} of {1}', hex(row.qpn), row.device)}` : ''));
      return;
    }
    const fate = this.model.fateOf(row);
    const facts = [`PSN ${row.psn}`, `QP ${hex(row.qpn)} → ${hex(row.to)}`,
      tr('{0} bytes of payload', row.bytes)];
    if (row.aeth) facts.push(row.aeth.text, `MSN ${row.msn}`);
    if (typeof row.address === 'number') {
      facts.push(`${tr('address')} ${hex(row.address)}`, `R_Key ${hex(row.rkey)}`);
    }
    if (row.ackReq) facts.push(tr('asks for an ACK'));
    if (row.again) facts.push(tr('sent again'));
    if (row.arrived && fate === 'arrived') {
      facts.push(tr('arrived after {0}', timeText(row.arrived - row.t)));
    }
    for (const {id, side} of row.rules) {
      facts.push(tr('rule {0} on {1}: {2}', id, side,
        this.model.ruleTexts.get(id) || tr('removed since')));
    }
    if (fate === 'lost') facts.push(tr('lost'));
    if (fate === 'held') facts.push(tr('held: Step lets it go'));
    if (fate === 'refused') facts.push(tr('refused: {0}', row.reason));
    this.details.replaceChildren(el('strong', {}, row.opcode.replaceAll('_', ' ')),
      el('span', {}, ` — ${facts.join(' · ')}${tr('. ')}`),
      el('span', {class: 'dim'}, meaning(row.opcode)));
  }

  // The rows that pass the filter (at most the last `most`) as a picture of its own.
  exportSvg(most = 2000) {
    const width = 1000, height = 34;
    const rows = this.shown.slice(-most);
    this.rem = 16;
    const place = this.geometry(width);
    const styles = getComputedStyle(document.documentElement);
    const color = (name) => styles.getPropertyValue(name).trim();
    const total = rows.length * height + 70;
    const picture = svg('svg', {xmlns: 'http://www.w3.org/2000/svg', width, height: total,
      viewBox: `0 0 ${width} ${total}`, 'font-family': 'system-ui, sans-serif'});
    const css = `.hit{fill:none}text{font-size:14px;fill:${color('--ink')}}.time{text-anchor:end;`
      + `fill:${color('--dim')};font-size:12px}.label,.gap{text-anchor:middle}.note.end{`
      + `text-anchor:end}.note{fill:${color('--dim')}}.note.bad,.label.nak,.label.lost,`
      + `.label.refused{fill:${color('--bad')}}.note.timer,.label.again{fill:${color('--again')}}`
      + `.lifelines line{stroke:${color('--line')};stroke-width:2}.arrow{stroke:`
      + `${color('--request')};stroke-width:2}text.arrow{stroke:none}.arrow.ack{stroke:`
      + `${color('--ack')}}.arrow.response{stroke:${color('--response')}}.arrow.nak{stroke:`
      + `${color('--bad')}}.arrow.again{stroke:${color('--again')};stroke-dasharray:7 4}`
      + `text.arrow{stroke:none!important}.head{fill:${color('--ink')};stroke-dasharray:none!important}`
      + `.cross{stroke:${color('--bad')};stroke-width:3}.dot{fill:${color('--dim')}}`;
    picture.append(svg('style', {}, css),
      svg('rect', {width: '100%', height: '100%', fill: color('--card')}));
    const body = svg('g', {transform: 'translate(0 50)'}, this.lifelines(place, total - 60));
    const heads = this.laneNames();
    picture.append(
      svg('text', {x: place.left, y: 30, 'text-anchor': 'start', 'font-weight': 'bold'}, heads[0]),
      svg('text', {x: place.right, y: 30, 'text-anchor': 'end', 'font-weight': 'bold'}, heads[1]));
    rows.forEach((row, i) => body.append(this.row(row, i * height, height, place, i)));
    picture.append(body);
    this.rem = 0;
    return new XMLSerializer().serializeToString(picture);
  }

  laneNames() {
    const devices = this.model.devices();
    if (this.filter) {
      const names = ['', ''];
      for (const qp of this.model.qps.values()) {
        if (this.model.pairOf(qp.qpn) === this.filter) {
          names[this.model.laneOf(qp.qpn)] = `${qp.device} · QP ${hex(qp.qpn)}`;
        }
      }
      return names;
    }
    return [devices[0] || '', devices.length > 1 ? devices.slice(1).join(', ') : devices[0] || ''];
  }
}
