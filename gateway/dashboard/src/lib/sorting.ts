/** The order of many replicas by a measured value, without a comparison in JavaScript for each pair. */

import type { Columns } from './store/columns';
import { NONE } from './store/frames';

export type Measure = 'state' | 'step' | 'lag' | 'loss' | 'pace';

const PLACES = 2 ** 20; // a place and a key of 33 bits fit into a double
const LAST = 2 ** 32;

/**
 * Return the places of replicas in the order of a measure. Those without a value come last.
 *
 * @param numbers the replicas' places in the columns
 * @param leads for each of them, the highest step of its job, from which its lag is counted
 */
export function orderBy(
  measure: Measure,
  down: boolean,
  numbers: Uint32Array,
  columns: Columns,
  leads: readonly (number | null)[],
): Uint32Array {
  const keys = new Float64Array(numbers.length);
  for (let at = 0; at < keys.length; at += 1) {
    const key = keyOf(measure, numbers[at]!, columns, leads[at] ?? null);
    keys[at] = (key === LAST ? LAST : down ? LAST - 1 - key : key) * PLACES + at;
  }
  keys.sort();
  return Uint32Array.from(keys, (key) => key % PLACES);
}

function keyOf(measure: Measure, number: number, columns: Columns, lead: number | null): number {
  const step = columns.step[number]!;
  switch (measure) {
    case 'state':
      return columns.state[number]! & 0x7f;
    case 'step':
      return step === NONE ? LAST : step;
    case 'lag':
      return step === NONE || lead === null ? LAST : Math.min(LAST - 1, Math.max(0, lead - step));
    case 'loss':
      return inOrder(columns.lossBits[number]!);
    case 'pace':
      return inOrder(columns.paceBits[number]!);
  }
}

/** Return the bits of a float as a number with the floats' order. */
function inOrder(bits: number): number {
  if (bits === NONE) return LAST;
  return bits & 0x8000_0000 ? ~bits >>> 0 : (bits | 0x8000_0000) >>> 0;
}
