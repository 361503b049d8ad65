/** The newest points of the metrics of replicas that somebody looks at. */

import { toNumber } from '../format';
import { NO_POINTS, Series, type Points } from '../series';
import type { Replica } from './replicas';

const KEPT = 900; // of each metric
const ROOM = 120; // of each metric at first: a replica may have hundreds

export class Live {
  #followed = new Map<string, { readers: number; metrics: Map<string, Series> }>();

  /** Keep the points of a replica until the returned function is called. */
  follow(id: string): () => void {
    const followed = this.#followed.get(id) ?? { readers: 0, metrics: new Map<string, Series>() };
    followed.readers += 1;
    this.#followed.set(id, followed);
    return () => {
      followed.readers -= 1;
      if (followed.readers === 0) this.#followed.delete(id);
    };
  }

  /** The points of a metric. */
  points(id: string, metric: string): Points {
    return this.#followed.get(id)?.metrics.get(metric)?.points ?? NO_POINTS;
  }

  /** Take what a replica reports now; return whether it is followed. */
  take(one: Replica): boolean {
    const followed = this.#followed.get(one.id);
    if (!followed || one.reported === null) return false;
    for (const name in one.metrics) {
      let series = followed.metrics.get(name);
      if (!series) followed.metrics.set(name, (series = new Series(KEPT, ROOM)));
      series.push(one.reported, toNumber(one.metrics[name]));
    }
    return true;
  }
}
