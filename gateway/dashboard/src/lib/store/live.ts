/** The newest points of the metrics of replicas that somebody looks at. */

import { toNumber } from '../format';
import { NO_POINTS, Series, type Points } from '../series';
import { Followed } from './followed';
import type { Replica } from './replicas';

const KEPT = 900; // of each metric
const ROOM = 120; // of each metric at first: a replica may have hundreds

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

  /** Take what a replica reports now; return whether it is followed. */
  take(one: Replica): boolean {
    const metrics = this.#followed.get(one.id);
    if (!metrics || one.reported === null) return false;
    for (const name in one.metrics) {
      let series = metrics.get(name);
      if (!series) metrics.set(name, (series = new Series(KEPT, ROOM)));
      series.push(one.reported, toNumber(one.metrics[name]));
    }
    return true;
  }
}
