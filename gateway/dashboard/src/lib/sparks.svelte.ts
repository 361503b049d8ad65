/** Small curves of runs, for rows in sight: some are loaded at a time, and those of living runs again after a while. */

import { lossName } from './series';
import { loadCurves } from './runs.svelte';
import type { CurveSection, Run } from './types';

const POINTS = 40;
const AT_ONCE = 4;
const SETTLED = 120; // milliseconds for which a row has to be in sight: those that are scrolled past load nothing
const AGAIN = 15_000; // milliseconds after which the curve of a living run is loaded again
const KEPT = 2000;

/** The curve of one run: when it comes, the row of its run changes, and no other. */
class Spark {
  /** Null while it is not known. */
  sections = $state.raw<CurveSection[] | null>(null);
  loaded = 0;
  /** The state of the run when it was loaded: the curve of an ended run is complete. */
  state = '';
}

class Sparks {
  #known = new Map<string, Spark>();
  #waiting = new Map<string, Run>();
  #loading = 0;

  /** Return the curve of a run's loss. */
  of(run: string): Spark {
    let spark = this.#known.get(run);
    if (!spark) {
      this.#known.set(run, (spark = new Spark()));
      if (this.#known.size > KEPT) this.#known.delete(this.#known.keys().next().value!);
    }
    return spark;
  }

  /** Load the curve of a run unless that is known; give up when the returned function is called first. */
  want(run: Run): () => void {
    const known = this.of(run.id);
    const fresh = known.loaded && (known.state !== 'running' ? known.state === run.state : Date.now() - known.loaded < AGAIN && run.state === 'running');
    if (fresh || lossName(Object.keys(run.summary)) === null) return () => undefined;
    const timer = setTimeout(() => {
      this.#waiting.set(run.id, run);
      this.#load();
    }, SETTLED);
    return () => {
      clearTimeout(timer);
      this.#waiting.delete(run.id);
    };
  }

  #load(): void {
    while (this.#loading < AT_ONCE) {
      const [first] = this.#waiting.values();
      if (!first) return;
      this.#waiting.delete(first.id);
      this.#loading += 1;
      void this.#one(first).finally(() => {
        this.#loading -= 1;
        this.#load();
      });
    }
  }

  async #one(run: Run): Promise<void> {
    const loaded = Date.now();
    let sections: CurveSection[] = [];
    try {
      sections = (await loadCurves(run.id, lossName(Object.keys(run.summary))!, { points: POINTS })).curves[0]?.sections ?? [];
    } catch {
      // A run that was removed meanwhile, or has no points any more, has no curve.
    }
    Object.assign(this.of(run.id), { sections, loaded, state: run.state });
  }
}

export const sparks = new Sparks();
