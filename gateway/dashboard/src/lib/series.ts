/** The newest points of a curve, in memory that does not grow. */

const LEAST = 64;
const SHORTEST_GAP = 10; // seconds
const GAP_FACTOR = 8; // times the usual time between two points
const NOTHING = new Float64Array(0); // of each series without a point, of which there are many

/** Times and values, the oldest first. A point without a finite value is left out: a curve goes on over it, but not over a gap. */
export class Series {
  readonly #most: number;
  readonly #room: number;
  #times = NOTHING;
  #values = NOTHING;
  #begin = 0;
  #end = 0;
  #odd = 0;

  /**
   * @param kept the points that are kept
   * @param room the points that there is room for with the first one; more is taken when they are full
   */
  constructor(
    readonly kept: number,
    room = Infinity,
  ) {
    this.#most = kept + Math.ceil(kept / 4);
    this.#room = Math.min(this.#most, Math.max(room, LEAST));
  }

  get length(): number {
    return this.#end - this.#begin;
  }

  /** The times, as a view that stays as it is: points are never written over. */
  get times(): Float64Array {
    return this.#times.subarray(this.#begin, this.#end);
  }

  /** The values, as `times` are. */
  get values(): Float64Array {
    return this.#values.subarray(this.#begin, this.#end);
  }

  /** The points as they are now: another object each time, so that components see the change. */
  get points(): Points {
    const { times, values } = this;
    return { times, values, odd: this.#odd };
  }

  /** Add a point, and drop the oldest one if there are too many. */
  push(time: number, value: number | null): void {
    if (value === null) return;
    if (Number.isFinite(value)) this.#put(time, value);
    else this.#odd += 1;
  }

  /** Have the curve end here, until the next point: a NaN stands for the gap. */
  gap(time: number): void {
    if (this.length && !Number.isNaN(this.#values[this.#end - 1])) this.#put(time, NaN);
  }

  #put(time: number, value: number): void {
    if (this.#end === this.#times.length) this.#renew();
    this.#times[this.#end] = time;
    this.#values[this.#end] = value;
    this.#end += 1;
    if (this.length > this.kept) this.#begin += 1;
  }

  /** Go on in fresh memory, with the points that are kept: older views keep theirs. */
  #renew(): void {
    const { times, values } = this;
    const size = times.length ? Math.min(this.#most, Math.max(LEAST, 2 * times.length)) : this.#room;
    this.#times = new Float64Array(size);
    this.#values = new Float64Array(size);
    this.#times.set(times);
    this.#values.set(values);
    this.#begin = 0;
    this.#end = times.length;
  }
}

/** Return the points of a curve from two sources: those of the second that are later than the first's last one. */
export function joined(first: Points, second: Points): Points {
  const last = first.times.at(-1) ?? -Infinity;
  const { length } = second.times;
  let from = length;
  while (from > 0 && second.times[from - 1]! > last) from -= 1;
  if (from === length) return first;
  if (!first.times.length) return second;
  return { times: concat(first.times, second.times.subarray(from)), values: concat(first.values, second.values.subarray(from)) };
}

export interface Points {
  readonly times: Float64Array;
  readonly values: Float64Array;
  /** The points that are left out, since their values are not finite. */
  readonly odd?: number;
}

export const NO_POINTS: Points = { times: new Float64Array(0), values: new Float64Array(0), odd: 0 };

/** Return the finite ones of some points, and the number of the others. */
export function pointsOf(points: readonly (readonly [time: number, value: number | null])[]): Points {
  const finite = points.filter(([, value]) => value !== null && Number.isFinite(value));
  return { times: Float64Array.from(finite, ([time]) => time), values: Float64Array.from(finite, ([, value]) => value!), odd: points.length - finite.length };
}

/** Return the seconds between two points beyond which there is a gap. */
export function longestStep(times: Float64Array): number {
  const steps = Float64Array.from(times.subarray(1), (time, at) => time - times[at]!).sort();
  return Math.max(SHORTEST_GAP, GAP_FACTOR * (steps[steps.length >> 1] ?? 0));
}

/** Return points with a gap wherever there were none for much longer than usual, and for some seconds. */
export function withGaps(points: Points): Points {
  const { times, values } = points;
  const longest = longestStep(times);
  const found: [number, number][] = [];
  times.forEach((time, at) => {
    if (at && time - times[at - 1]! > longest) found.push([(time + times[at - 1]!) / 2, NaN]);
    found.push([time, values[at]!]);
  });
  return found.length === times.length ? points : { times: Float64Array.from(found, ([time]) => time), values: Float64Array.from(found, ([, value]) => value) };
}

/** Return the name of the loss among those of metrics: `loss`, or else the first one like it. */
export function lossName(names: readonly string[]): string | null {
  return names.find((name) => name === 'loss') ?? names.find((name) => name.toLowerCase().includes('loss')) ?? null;
}

/** Return the names of metrics, the loss first. */
export function lossFirst(names: readonly string[]): string[] {
  const loss = lossName(names);
  return loss === null ? [...names] : [loss, ...names.filter((name) => name !== loss)];
}

function concat(one: Float64Array, other: Float64Array): Float64Array {
  const both = new Float64Array(one.length + other.length);
  both.set(one);
  both.set(other, one.length);
  return both;
}
