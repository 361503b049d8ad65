/**
 * Small curves of runs, for rows in sight: some are loaded at a time. That of a living run goes on with what the list of runs tells, and
 * is loaded again after a while.
 */

import { store } from './page';
import { metricValue } from './runvalues';
import { lossName } from './series';
import { loadCurves } from './runs.svelte';
import type { CurveSection, Run } from './types';

const POINTS = 40;
const AT_ONCE = 4; // of those that are not known
const PAUSE = 2500; // milliseconds between two known curves that are loaded again: all of a table at once would be felt
const SETTLED = 120; // milliseconds for which a row has to be in sight: those that are scrolled past load nothing
const AGAIN = 60_000; // milliseconds after which the curve of a living run is loaded again
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
  #next: ReturnType<typeof setTimeout> | undefined;
  #renewed = 0; // when a known curve was loaded last

  /** Return the curve of a run's loss. */
  of(run: string): Spark {
    let spark = this.#known.get(run);
    if (!spark) {
      this.#known.set(run, (spark = new Spark()));
      if (this.#known.size > KEPT) this.#known.delete(this.#known.keys().next().value!);
    }
    return spark;
  }

  /** Load the curve of a run unless that is known, or have it go on; give up when the returned function is called first. */
  want(run: Run): () => void {
    const known = this.of(run.id);
    const fresh = known.loaded && (known.state !== 'running' ? known.state === run.state : Date.now() - known.loaded < AGAIN && run.state === 'running');
    if (run.state === 'running') goOn(known, run);
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
      const [first] = [...this.#waiting.values()].sort((one, other) => this.of(one.id).loaded - this.of(other.id).loaded);
      if (!first) return;
      if (this.of(first.id).loaded) {
        const wait = this.#renewed + PAUSE - Date.now();
        clearTimeout(this.#next);
        if (wait > 0) return void (this.#next = setTimeout(() => this.#load(), wait));
        this.#renewed = Date.now();
      }
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
    const spark = this.of(run.id);
    const show = (): void => void (spark.sections = sections);
    if (spark.sections === null) show();
    else store.later(show);
    Object.assign(spark, { loaded, state: run.state });
  }
}

/** Add the last step of a run to its curve: both are of the rank that leads. */
function goOn(spark: Spark, run: Run): void {
  const { sections } = spark;
  const last = sections?.at(-1);
  const name = lossName(Object.keys(run.summary));
  const loss = name === null ? null : metricValue(run, name);
  if (!last || loss === null || run.step === null || last.step.includes(null) || run.step <= last.step.at(-1)!) return;
  const value = Number.isFinite(loss) ? loss : null;
  const time = last.time.at(-1)!; // steps are known, and it is drawn by these
  const grown = {
    time: [...last.time, time],
    step: [...last.step, run.step],
    value: [...last.value, value],
    low: [...last.low, value],
    high: [...last.high, value],
  };
  spark.sections = [...sections!.slice(0, -1), grown];
}

export const sparks = new Sparks();
