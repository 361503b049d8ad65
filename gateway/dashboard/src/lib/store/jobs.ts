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

/**
 * The jobs by name. A job that changes becomes another object, and one that does not stays the same one: of a
 * thousand that have ended none costs anything from then on.
 */
export class Jobs {
  #jobs = new Map<string, Job>();
  /** Those whose curves go on, or have to end. */
  #drawn = new Set<string>();
  #sampled = 0;
  #order: string[] | null = [];
  #goodput: readonly GoodputRecord[] = [];
  /** The goodput of all jobs that there ever were. */
  #records: ReadonlyMap<string, GoodputRecord[]> = new Map();
  #counts: Map<ReplicaState, number> | null = new Map();

  get(name: string): Job | undefined {
    return this.#jobs.get(name);
  }

  /** Forget jobs that are not among those of a snapshot. The others are as they were, until their aggregates come. */
  keep(names: ReadonlySet<string>): void {
    for (const name of this.#jobs.keys()) if (!names.has(name)) this.#forget(name);
  }

  #forget(name: string): void {
    this.#jobs.delete(name);
    this.#drawn.delete(name);
    this.#order = this.#counts = null;
  }

  /** Take aggregates; return whether the number of replicas in a state has changed. */
  take(aggregates: Readonly<Record<string, Aggregate | null>>): boolean {
    for (const [name, one] of Object.entries(aggregates)) {
      if (one === null) {
        this.#forget(name);
        continue;
      }
      const known = this.#jobs.get(name);
      const kept = this.#jobs.size < MANY ? KEPT_POINTS : KEPT_OF_MANY;
      const job: Job = {
        name,
        group: one.group,
        session: one.session,
        user: one.user,
        replicas: one.replicas,
        living: one.living,
        states: statesOf(one, known),
        step: one.step,
        maxStep: one.max_step,
        rate: one.rate,
        loss: one.loss,
        notFinite: one.not_finite,
        goodput: null,
        losses: known?.losses ?? new Series(kept),
        rates: known?.rates ?? new Series(kept),
      };
      job.goodput = recordOf(job, this.#records.get(name));
      this.#jobs.set(name, job);
      this.#drawn.add(name);
      if (job.states !== known?.states) this.#counts = null;
      if (!known || known.living > 0 !== job.living > 0) this.#order = null;
    }
    return this.#counts === null;
  }

  /** Note each running job's loss and rate, at most once a second; return whether that was done. The others' curves have a gap. */
  sample(time: number): boolean {
    if (time - this.#sampled < EVERY) return false;
    this.#sampled = time;
    for (const name of this.#drawn) {
      const job = this.#jobs.get(name)!;
      const { states, losses, rates, loss, rate } = job;
      if (states.get('running')) {
        losses.push(time, loss);
        rates.push(time, rate);
      } else {
        losses.gap(time);
        rates.gap(time);
        this.#drawn.delete(name);
      }
      this.#jobs.set(name, { ...job });
    }
    return true;
  }

  /** The jobs with their goodput: living ones first, then by name. */
  list(goodput: readonly GoodputRecord[]): Job[] {
    this.account(goodput);
    this.#order ??= [...this.#jobs.values()]
      .sort((one, other) => Number(other.living > 0) - Number(one.living > 0) || (one.name < other.name ? -1 : 1))
      .map((one) => one.name);
    return this.#order.map((one) => this.#jobs.get(one)!);
  }

  /** Give the jobs their goodput, unless they have it. */
  account(goodput: readonly GoodputRecord[]): void {
    if (goodput === this.#goodput) return;
    this.#goodput = goodput;
    this.#records = grouped(goodput, (one) => one.job);
    for (const [name, job] of this.#jobs) {
      const record = recordOf(job, this.#records.get(name));
      if (record !== job.goodput) this.#jobs.set(name, { ...job, goodput: record });
    }
  }

  /** The number of replicas in each state: another object only when it has changed. */
  states(): Map<ReplicaState, number> {
    if (this.#counts === null) {
      this.#counts = new Map();
      for (const { states } of this.#jobs.values()) states.forEach((count, state) => this.#counts!.set(state, (this.#counts!.get(state) ?? 0) + count));
    }
    return this.#counts;
  }
}

/** The replicas in each state: the known object as long as they are as many. */
function statesOf({ states }: Aggregate, known: Job | undefined): Map<ReplicaState, number> {
  const found = Object.entries(states) as [ReplicaState, number][];
  const same = known?.states.size === found.length && found.every(([state, count]) => known.states.get(state) === count);
  return same ? known.states : new Map(found);
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
