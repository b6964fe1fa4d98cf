// SPDX-License-Identifier: Apache-2.0
//
// The timeline of work requests, and the plots of rate, packets in flight and retransmissions.
import {bytesText, el, opcodeText, short, svg, timeText, tr} from './text.js';
import {shortId} from './model.js';

const REQUESTS_SHOWN = 9;
const ROW = 17;
const WIDTH = 460;
const LEFT = 168;
const RIGHT = 138;  // of the longest status

// A row per work request, from the moment it was posted: waiting in the queue, packets under way,
// acknowledged, completed.
export function requestTimeline(qps, now) {
  const all = qps.flatMap((qp) => qp.requests.slice(-REQUESTS_SHOWN));
  all.sort((a, b) => a.posted - b.posted);
  const shown = all.slice(-REQUESTS_SHOWN);
  if (shown.length === 0) return el('p', {class: 'dim'}, tr('No work request has been posted yet.'));
  const longest = Math.max(1000, ...shown.map((wr) => (wr.done ?? now) - wr.posted));
  const rows = shown.map((wr, i) => {
    const y = 16 + i * ROW;
    const over = wr.done ?? now;
    const bad = wr.status && wr.status !== 'SUCCESS';
    const x = (t) => LEFT + (WIDTH - LEFT - RIGHT) * Math.min(1, (t - wr.posted) / longest);
    const bar = (from, to, kind) => to > from ? svg('rect', {x: x(from), y: y + 2,
      width: Math.max(1.5, x(to) - x(from)), height: ROW - 6, rx: 2, class: `bar ${kind}`}) : null;
    const sent = wr.sent ?? over;
    const acked = wr.acked ?? over;
    const took = wr.done === null ? tr('under way') : timeText(wr.done - wr.posted);
    return svg('g', {},
      svg('title', {}, tr('wr_id {0}: {1}, {2} bytes, {3} packets, {4} sent again, {5}, {6}',
        shortId(wr.id), wr.opcode, wr.bytes, wr.packets, wr.again.length,
        wr.status || tr('not completed'), took)),
      svg('text', {x: LEFT - 6, y: y + ROW - 6, class: bad ? 'who bad' : 'who'},
        `${opcodeText(wr.opcode).slice(0, 15)} ${bytesText(wr.bytes)} · ${shortId(wr.id).slice(-6)}`),
      bar(wr.posted, sent, 'queued'), bar(sent, Math.min(acked, over), 'flying'),
      bar(acked, over, 'acked'),
      bad && svg('rect', {x: x(over) - 4, y: y + 1, width: 4, height: ROW - 4, class: 'bar bad'}),
      wr.again.map((t) => svg('path', {class: 'mark again', d: `M${x(t)} ${y + 1}v${ROW - 4}`})),
      wr.naks.map((t) => svg('circle', {class: 'mark nak', cx: x(t), cy: y + ROW / 2 - 1, r: 3.5})),
      svg('text', {x: Math.min(x(over) + 5, WIDTH - RIGHT + 5), y: y + ROW - 6,
        class: bad ? 'who bad begin' : 'who begin'}, bad ? wr.status.slice(0, 18) : took));
  });
  return svg('svg', {viewBox: `0 0 ${WIDTH} ${20 + REQUESTS_SHOWN * ROW}`, class: 'requests',
    role: 'img', 'aria-label': tr('The last {0} work requests; the longest took {1}',
      shown.length, timeText(longest))},
  svg('text', {x: LEFT, y: 11, class: 'scale'}, tr('posted')),
  svg('text', {x: WIDTH - RIGHT, y: 11, class: 'scale end'}, timeText(longest)), rows);
}

const PLOT_WIDTH = 300;
const PLOT_HEIGHT = 46;
const MINUTE_NS = 60e9;

function plot(points, key, name, unit, kind) {
  const peak = Math.max(1, ...points.map((point) => point[key]));
  const now = points.length ? points[points.length - 1][key] : 0;
  // Points come faster while something happens.
  const end = points.length ? points[points.length - 1].t : 0;
  const length = points.length ? Math.max(1, end - points[0].t) : 1;
  const x = (i) => PLOT_WIDTH * (1 - (end - points[i].t) / length);
  const y = (value) => PLOT_HEIGHT - 2 - (PLOT_HEIGHT - 6) * value / peak;
  let shape;
  if (kind === 'bars') {
    shape = points.map((point, i) => point[key] > 0 ? svg('path', {class: `plot ${key}`,
      d: `M${x(i)} ${PLOT_HEIGHT - 2}V${y(point[key])}`}) : null);
  } else {
    const line = points.map((point, i) => `${i ? 'L' : 'M'}${x(i).toFixed(1)} ${
      y(point[key]).toFixed(1)}`).join('');
    shape = line && svg('path', {class: `plot ${key}`, d: line});
  }
  const words = tr('{0}: {1}, at most {2}', tr(name), short(now) + unit, short(peak) + unit);
  return el('figure', {class: 'plot-figure'},
    el('figcaption', {}, tr(name), el('strong', {}, ` ${short(now)}${unit}`),
      el('span', {class: 'dim'}, ` ${tr('max')} ${
        short(Math.max(0, ...points.map((point) => point[key])))}`)),
    svg('svg', {viewBox: `0 0 ${PLOT_WIDTH} ${PLOT_HEIGHT}`, preserveAspectRatio: 'none',
      class: 'plot-picture', role: 'img', 'aria-label': words},
    svg('path', {class: 'axis', d: `M0 ${PLOT_HEIGHT - 1}H${PLOT_WIDTH}`}), shape));
}

export function plots(all, live) {
  const end = all.length ? all[all.length - 1].t : 0;
  const points = live ? all.filter((point) => end - point.t <= MINUTE_NS) : all;
  return [plot(points, 'bytes', 'Rate', ' B/s'), plot(points, 'packets', 'Packets', ' /s'),
    plot(points, 'inFlight', 'In flight', ''), plot(points, 'again', 'Sent again', '', 'bars')];
}
