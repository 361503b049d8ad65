/** The jobs, as the gateway sums them up, and their curves of the last minutes. */

import { duration } from '../format';
import { Series } from '../series';
import { grouped } from '../sets';
import type { Aggregate, GoodputRecord, ReplicaState } from '../types';

const KEPT_POINTS = 900; // of each job
const MANY = 100; // jobs; those that come when there are more have shorter curves
const KEPT_OF_MANY = 120;
const EVERY = 0.9; // seconds

export interface Job {
  name: string;
  group: string;
  session: string | null;
  user: string;
  replicas: number;
  living: number;
  states: Map<ReplicaState, number>;
  step: number | null;
  maxStep: number | null;
  /** Steps a second of the median replica. */
  rate: number | null;
  /** The mean over the living replicas whose loss is finite. */
  loss: number | null;
  /** Living replicas whose loss is not finite. */
  notFinite: number;
  goodput: GoodputRecord | null;
  /** The loss of the last minutes. */
  losses: Series;
  /** The steps a second of the last minutes. */
  rates: Series;
}

/** Return the time that a job takes to its last step, as it runs now; null if that is not known. */
export function leftOf({ step, maxStep, rate }: Job): string | null {
  return maxStep === null || step === null || !rate || step >= maxStep ? null : duration((maxStep - step) / rate);
}

export class Jobs {
  #jobs = new Map<string, Job>();
  #sampled = 0;
  /** Of all jobs that there ever were. */
  #indexed: { of: readonly GoodputRecord[]; byJob: ReadonlyMap<string, GoodputRecord[]> } = { of: [], byJob: new Map() };

  /** Forget jobs that are not among those of a snapshot. The others are as they were, until their aggregates come. */
  keep(names: ReadonlySet<string>): void {
    for (const name of this.#jobs.keys()) if (!names.has(name)) this.#jobs.delete(name);
  }

  take(aggregates: Readonly<Record<string, Aggregate | null>>): void {
    for (const [name, one] of Object.entries(aggregates)) {
      if (one === null) this.#jobs.delete(name);
      else {
        const known = this.#jobs.get(name);
        const kept = this.#jobs.size < MANY ? KEPT_POINTS : KEPT_OF_MANY;
        this.#jobs.set(name, {
          name,
          group: one.group,
          session: one.session,
          user: one.user,
          replicas: one.replicas,
          living: one.living,
          states: new Map(Object.entries(one.states) as [ReplicaState, number][]),
          step: one.step,
          maxStep: one.max_step,
          rate: one.rate,
          loss: one.loss,
          notFinite: one.not_finite,
          goodput: null,
          losses: known?.losses ?? new Series(kept),
          rates: known?.rates ?? new Series(kept),
        });
      }
    }
  }

  /** Note each running job's loss and rate, at most once a second; return whether that was done. The others' curves have a gap. */
  sample(time: number): boolean {
    if (time - this.#sampled < EVERY) return false;
    this.#sampled = time;
    for (const { states, losses, rates, loss, rate } of this.#jobs.values()) {
      if (states.get('running')) {
        losses.push(time, loss);
        rates.push(time, rate);
      } else {
        losses.gap(time);
        rates.gap(time);
      }
    }
    return true;
  }

  /** The jobs with their goodput: living ones first, then by name. */
  list(goodput: readonly GoodputRecord[]): Job[] {
    if (goodput !== this.#indexed.of) this.#indexed = { of: goodput, byJob: grouped(goodput, (one) => one.job) };
    return [...this.#jobs.values()]
      .map((one) => ({ ...one, goodput: recordOf(one, this.#indexed.byJob.get(one.name)) }))
      .sort((one, other) => Number(other.living > 0) - Number(one.living > 0) || (one.name < other.name ? -1 : 1));
  }

  /** The number of replicas in each state. */
  states(): Map<ReplicaState, number> {
    const counts = new Map<ReplicaState, number>();
    for (const job of this.#jobs.values())
      for (const [state, count] of job.states) counts.set(state, (counts.get(state) ?? 0) + count);
    return counts;
  }
}

function recordOf(job: Job, records: readonly GoodputRecord[] = []): GoodputRecord | null {
  return records.find((one) => !one.user || !job.user || one.user === job.user) ?? null;
}

/** Merge records of goodput into known ones; pushed records have no timeline, so that the known one is kept. */
export function mergeGoodput(known: readonly GoodputRecord[], records: readonly GoodputRecord[], all: boolean): GoodputRecord[] {
  const key = (one: GoodputRecord): string => `${one.user ?? ''}\0${one.job}`;
  const before = new Map(known.map((one) => [key(one), one]));
  const fresh = records.map((one) => {
    const old = before.get(key(one));
    return { ...one, course: one.course?.length ? one.course : (old?.course ?? []), faults: one.faults ?? old?.faults ?? [] };
  });
  return all ? fresh : [...new Map([...before, ...fresh.map((one) => [key(one), one] as const)]).values()];
}
