/** Colours of the cells of replicas: a bin for each, by state or by a measured value. */

import type { Columns } from './store/columns';
import { NONE } from './store/frames';
import { STATES } from './types';

export const MODES = ['state', 'lag', 'loss', 'pace'] as const;

export type Mode = (typeof MODES)[number];

export const MODE_NAMES: Record<Mode, string> = {
  state: 'state',
  lag: 'step lag',
  loss: 'loss',
  pace: 'seconds a step',
};

/** Bins 0 to 7 are states, then come those of the ramp, then these two. */
export const RAMP_BINS = 16;
export const FIRST_OF_RAMP = STATES.length;
export const UNKNOWN = FIRST_OF_RAMP + RAMP_BINS;
export const NOT_FINITE = UNKNOWN + 1;
export const BINS = NOT_FINITE + 1;

export interface Colouring {
  mode: Mode;
  bins: Uint8Array;
  /** The values at both ends of the ramp; null if no replica has one, or by state. */
  low: number | null;
  high: number | null;
}

const SAMPLE = 1024; // values from which the range is read
let scratch = new Float64Array(0); // for the values of all replicas: fresh memory twice a second wakes the garbage collector
const sample = new Float64Array(SAMPLE);

function room(size: number): Float64Array {
  if (scratch.length < size) scratch = new Float64Array(size);
  return scratch.subarray(0, size);
}

const TOLERANCE = 0.05; // of the range, by which its ends may be off

/**
 * Return the bin of each replica.
 *
 * @param numbers the replicas' places in the columns
 * @param before the bins before: its range is kept while it fits about, so that colours stay and few cells change
 */
export function colourCells(mode: Mode, numbers: Uint32Array, columns: Columns, before: Colouring | null = null): Colouring {
  const bins = new Uint8Array(numbers.length);
  if (mode === 'state') {
    const known = STATES as readonly string[];
    const binOf = columns.names.map((name) => (known.includes(name) ? known.indexOf(name) : UNKNOWN));
    for (let at = 0; at < bins.length; at += 1) bins[at] = binOf[columns.state[numbers[at]!]! & 0x7f] ?? UNKNOWN;
    return { mode, bins, low: null, high: null };
  }
  const values = mode === 'lag' ? lags(numbers, columns) : measured(mode, numbers, columns);
  let [low, high] = mode === 'lag' ? rangeOfLag(values) : spread(values);
  if (low === null || high === null) return { mode, bins: bins.fill(UNKNOWN), low, high };
  if (before?.mode === mode && fits(low, high, before)) ({ low, high } = before as { low: number; high: number });
  const scale = RAMP_BINS / (high - low || 1);
  for (let at = 0; at < bins.length; at += 1) {
    const one = values[at]!;
    if (Number.isNaN(one)) bins[at] = UNKNOWN;
    else if (one === Infinity || one === -Infinity) bins[at] = NOT_FINITE;
    else bins[at] = FIRST_OF_RAMP + Math.max(0, Math.min(RAMP_BINS - 1, Math.floor((one - low) * scale)));
  }
  return { mode, bins, low, high };
}

/** The steps by which living replicas are behind the first of their job; NaN for those without a step. */
function lags(numbers: Uint32Array, { state, step, job, ended, jobs }: Columns): Float64Array {
  const values = room(numbers.length);
  const first = new Float64Array(jobs);
  for (const one of numbers) if (step[one] !== NONE && !ended[state[one]! & 0x7f]) first[job[one]!] = Math.max(first[job[one]!]!, step[one]!);
  for (let at = 0; at < values.length; at += 1) {
    const one = numbers[at]!;
    values[at] = step[one] === NONE || ended[state[one]! & 0x7f] ? NaN : first[job[one]!]! - step[one]!;
  }
  return values;
}

/** The values of living replicas, with NaN for none, and with infinity for one that is not finite. */
function measured(mode: 'loss' | 'pace', numbers: Uint32Array, columns: Columns): Float64Array {
  const { state, ended } = columns;
  const from = columns[mode];
  const bits = mode === 'loss' ? columns.lossBits : columns.paceBits;
  const values = room(numbers.length);
  for (let at = 0; at < values.length; at += 1) {
    const one = numbers[at]!;
    const value = from[one]!;
    if (bits[one] === NONE || ended[state[one]! & 0x7f]) values[at] = NaN;
    else values[at] = Number.isNaN(value) ? Infinity : value;
  }
  return values;
}

function rangeOfLag(values: Float64Array): [number | null, number | null] {
  let high = -1;
  for (const one of values) if (one > high) high = one;
  return high < 0 ? [null, null] : [0, Math.max(high, 4)];
}

/** The range without outliers: from the 2nd to the 98th percentile. */
function spread(values: Float64Array): [number | null, number | null] {
  const stride = Math.ceil(values.length / SAMPLE);
  let taken = 0;
  for (let at = 0; at < values.length; at += stride) if (Number.isFinite(values[at])) sample[taken++] = values[at]!;
  // In a large grid few have values, and the sample may have missed them.
  if (!taken && stride > 1) return spread(values.filter(Number.isFinite));
  const finite = sample.subarray(0, taken).sort();
  if (!finite.length) return [null, null];
  const at = (share: number): number => finite[Math.round(share * (finite.length - 1))]!;
  return [at(0.02), at(0.98)];
}

function fits(low: number, high: number, before: Colouring): boolean {
  if (before.low === null || before.high === null) return false;
  const most = TOLERANCE * (before.high - before.low);
  return Math.abs(low - before.low) <= most && Math.abs(high - before.high) <= most;
}
