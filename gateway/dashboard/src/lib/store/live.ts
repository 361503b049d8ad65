/** The newest points of the metrics of replicas that somebody looks at. */

import { toNumber } from '../format';
import type { Replica } from './replicas';

const KEPT = 900; // of each replica

export interface LivePoint {
  time: number;
  step: number | null;
  metrics: Record<string, number>;
}

export class Live {
  #followed = new Map<string, { readers: number; points: LivePoint[] }>();

  /** Keep the points of a replica until the returned function is called. */
  follow(id: string): () => void {
    const followed = this.#followed.get(id) ?? { readers: 0, points: [] };
    followed.readers += 1;
    this.#followed.set(id, followed);
    return () => {
      followed.readers -= 1;
      if (followed.readers === 0) this.#followed.delete(id);
    };
  }

  /** The points, the oldest first. */
  points(id: string): readonly LivePoint[] {
    return this.#followed.get(id)?.points ?? [];
  }

  /** Take what a replica reports now; return whether it is followed. */
  take(one: Replica): boolean {
    const followed = this.#followed.get(one.id);
    if (!followed || one.reported === null) return false;
    const metrics: Record<string, number> = {};
    for (const [name, given] of Object.entries(one.metrics)) {
      const read = toNumber(given);
      if (read !== null) metrics[name] = read;
    }
    followed.points.push({ time: one.reported, step: one.step, metrics });
    if (followed.points.length > KEPT) followed.points.shift();
    return true;
  }
}
