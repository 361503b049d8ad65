/** The newest points of the metrics of replicas that somebody looks at. */

import { toNumber } from '../format';
import { NO_POINTS, Series, type Points } from '../series';
import { Followed } from './followed';
import type { Replica } from './replicas';

const KEPT = 900; // of each metric
const ROOM = 120; // of each metric at first: a replica may have hundreds
const STEPS = '\0steps'; // no metric has this name

export class Live {
  #followed = new Followed(() => new Map<string, Series>());

  /** Keep the points of a replica until the returned function is called. */
  follow(id: string): () => void {
    return this.#followed.follow(id);
  }

  /** The points of a metric. */
  points(id: string, metric: string): Points {
    return this.#followed.get(id)?.get(metric)?.points ?? NO_POINTS;
  }

  /** The step at the time of each point. */
  steps(id: string): Points {
    return this.points(id, STEPS);
  }

  /** Take what a replica reports now; return whether it is followed. */
  take(one: Replica): boolean {
    const metrics = this.#followed.get(one.id);
    if (!metrics || one.reported === null) return false;
    for (const name in one.metrics) push(metrics, name, one.reported, toNumber(one.metrics[name]));
    push(metrics, STEPS, one.reported, one.step);
    return true;
  }
}

function push(metrics: Map<string, Series>, name: string, time: number, value: number | null): void {
  let series = metrics.get(name);
  if (!series) metrics.set(name, (series = new Series(KEPT, ROOM)));
  series.push(time, value);
}
