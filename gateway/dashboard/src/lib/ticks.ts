/** Where the axes of a plot have their ticks, what these say, and from where to where the values go. */

import { clock, count, duration, number } from './format';
import type { Axis, Range } from './sections';

export interface Tick {
  at: number;
  text: string;
}

const NEAR = 80; // pixels between two ticks below a plot
const CLOSE = 28; // pixels between two ticks beside it
const DAY = 86400;
const LEAST_SHIFT = 900; // seconds, of which the times of all zones differ by multiples
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, DAY, 2 * DAY, 7 * DAY, 14 * DAY];
const day = new Intl.DateTimeFormat(undefined, { month: 'short', day: 'numeric' });

/** Return the ticks below a plot that is so many pixels wide. Times are those of the browser's zone. */
export function ticksOf(axis: Axis | 'elapsed', [from, until]: Range, width: number): Tick[] {
  const rough = ((until - from) * NEAR) / Math.max(width, NEAR);
  if (axis === 'step' || axis === 'samples') return multiples(Math.max(1, roundStep(rough)), from, until).map((at) => ({ at, text: compact(at) }));
  const step = SECONDS.find((one) => one >= rough) ?? Math.ceil(rough / (30 * DAY)) * 30 * DAY;
  if (axis === 'elapsed') return multiples(step, from, until).map((at) => ({ at, text: duration(at) }));
  const shift = (time: number): number => (step < LEAST_SHIFT ? 0 : new Date(time * 1000).getTimezoneOffset() * 60);
  const margin = step < LEAST_SHIFT ? 0 : DAY;
  return multiples(step, from - margin, until + margin)
    .map((time) => time + shift(time))
    .filter((time) => time >= from && time <= until)
    .map((at) => ({ at, text: step >= DAY ? day.format(at * 1000) : clock(at).slice(0, step >= 60 ? 5 : 8) }));
}

/** Return the ticks beside a plot that is so many pixels high. */
export function valueTicks([low, high]: Range, log: boolean, height: number): Tick[] {
  const most = Math.max(2, height / CLOSE);
  let found = log ? ofDecades(low, high, [1, 2, 5]) : [];
  if (found.length > most) found = ofDecades(low, high, [1]);
  if (found.length < 3) found = multiples(roundStep((high - low) / most), low, high);
  const every = Math.ceil(found.length / most);
  return found.filter((_, at) => !log || at % every === 0).map((at) => ({ at, text: number(at) }));
}

/** Return from where to where the axis of values goes, with some room around the values, if there are any. */
export function rangeOfValues(extent: Range | null, log: boolean): Range {
  if (!extent) return log ? [0.1, 1] : [0, 1];
  const [low, high] = extent;
  if (log) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
  if (low === high) return low === 0 ? [-1, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  const room = (high - low) * 0.06;
  return [low >= 0 && low < high * 0.25 ? 0 : low - room, high + room];
}

/** Return the least of 1, 2, 5, 10, … that is not less than a step, or the same at another power of ten. */
function roundStep(least: number): number {
  const size = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5].map((one) => one * size).find((one) => one >= least) ?? 10 * size;
}

function multiples(step: number, from: number, until: number): number[] {
  const first = Math.ceil(from / step);
  return Array.from({ length: Math.max(0, Math.floor(until / step) - first + 1) }, (_, at) => (first + at) * step);
}

function ofDecades(low: number, high: number, digits: readonly number[]): number[] {
  const first = Math.floor(Math.log10(low));
  return Array.from({ length: Math.ceil(Math.log10(high)) - first }, (_, at) => digits.map((one) => one * 10 ** (first + at)))
    .flat()
    .filter((one) => one >= low && one <= high);
}

function compact(value: number): string {
  if (Math.abs(value) >= 1e9) return `${number(value / 1e9)}B`;
  return Math.abs(value) >= 1e6 ? `${number(value / 1e6)}M` : count(value);
}
