/** The times of the newest steps of replicas that have lanes. */

import { LANE_STEPS, stepTimes, type StepTimes } from '../lanes';
import { Followed } from './followed';
import type { Replica } from './replicas';

interface Kept {
  steps: readonly StepTimes[];
  /** The number of the last step, the metrics with it, and those with the one before. */
  last: number | null;
  metrics: Replica['metrics'] | null;
  before: Replica['metrics'] | null;
}

const NONE: readonly StepTimes[] = [];

export class Steps {
  #followed = new Followed<Kept>(() => ({ steps: NONE, last: null, metrics: null, before: null }));

  /** Keep the steps of a replica until the returned function is called. */
  follow(id: string): () => void {
    return this.#followed.follow(id);
  }

  /** The newest steps, the oldest first: another list when there is a new one. */
  of(id: string): readonly StepTimes[] {
    return this.#followed.get(id)?.steps ?? NONE;
  }

  /** Take what a replica reports now; return whether it is a step of one that is followed. */
  take({ id, step, metrics }: Replica): boolean {
    const kept = this.#followed.get(id);
    if (!kept) return false;
    // A report of the same step has the last word on it.
    const again = step !== null && step === kept.last;
    if (!again) kept.before = kept.metrics;
    const times = stepTimes(metrics, kept.before);
    if (!times) return false;
    kept.steps = [...(again ? kept.steps.slice(0, -1) : kept.steps.slice(1 - LANE_STEPS)), times];
    kept.metrics = metrics;
    kept.last = step;
    return true;
  }
}
