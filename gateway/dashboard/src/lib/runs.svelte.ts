/** The list of runs, loaded by REST while a view shows it: when runs change, and the living ones every few seconds. */

import { untrack } from 'svelte';

import { store } from './page';
import { regularly } from './regularly';
import { sameThings } from './sets';
import { shown } from './shown.svelte';
import type { Run, RunCurves, RunDetails } from './types';

const MOST = 1000;
const EVERY = 5000; // milliseconds between two times that the living runs are loaded
const FACTOR = 5; // a list that takes long to load is loaded seldom: at most this part of the time goes into it

class Runs {
  /** The runs, the latest first. */
  list = $state.raw<readonly Run[]>([]);
  /** Why they could not be loaded; null if they were. */
  error = $state<string | null>(null);
  loaded = $state(false);

  #archived = false;
  #watchers = 0;
  #user: string | null = null;
  #stop = (): void => undefined;
  #asking = false;
  #again = false;
  #upTo: number | null = null; // the changes of runs that the list has; null: it was not loaded
  #loads = 0; // an answer that waits to be shown is not, once the runs are loaded again
  #watch = 0; // counts the times that the list was begun to be watched: an answer to an earlier one is not taken

  /** Keep the list as it is in the weaver until the returned function is called. Of archived runs only those are listed, if asked for. */
  watch(archived = false): () => void {
    if (archived !== this.#archived) {
      this.#archived = archived;
      this.#forget();
    }
    if (this.#watchers++ === 0) this.#begin();
    return () => {
      if (--this.#watchers === 0) this.#stop();
    };
  }

  #begin(): void {
    this.#watch += 1;
    this.#asking = this.#again = false;
    if (this.#user !== shown.user) {
      this.#user = shown.user;
      this.#forget();
    }
    const stopFollowing = $effect.root(() => {
      $effect(() => {
        // They come at most every two seconds, and when a snapshot has come. Meanwhile only living runs go on.
        void this.load(store.runChanges === this.#upTo ? 'running' : undefined);
      });
    });
    const stopLooking = regularly(EVERY, () => {
      if (this.list.some((one) => one.state === 'running')) void this.load('running');
    });
    this.#stop = () => {
      stopFollowing();
      stopLooking();
    };
  }

  #forget(): void {
    this.list = [];
    this.loaded = false;
    this.#upTo = null;
  }

  /** Load all runs, or the living ones alone, unless they are being loaded: then once more afterwards. */
  async load(state?: 'running'): Promise<void> {
    if (this.#asking) {
      this.#again ||= state === undefined;
      return;
    }
    this.#asking = true;
    const began = Date.now();
    const archived = this.#archived;
    const watch = this.#watch;
    const load = (this.#loads += 1);
    const upTo = untrack(() => store.runChanges);
    try {
      const path = `runs?limit=${MOST}${archived ? '&archived=true' : ''}${state ? `&state=${state}` : ''}`;
      const { runs } = await store.gateway.request<{ runs: Run[] }>('GET', path);
      if (watch !== this.#watch) return;
      if (archived === this.#archived && state)
        store.later(() => {
          if (load === this.#loads && archived === this.#archived) this.#take(runs, true);
        });
      else if (archived === this.#archived) {
        this.#take(runs, false);
        this.#upTo = upTo;
      }
      this.error = null;
    } catch (error) {
      if (watch !== this.#watch) return;
      this.error = (error as Error).message;
    }
    setTimeout(() => {
      if (watch !== this.#watch) return;
      this.#asking = false;
      if (this.#again && this.#watchers) {
        this.#again = false;
        void this.load();
      }
    }, FACTOR * (Date.now() - began));
  }

  /** Take runs; those that are as they were stay the same objects. */
  #take(found: readonly Run[], some: boolean): void {
    const known = new Map(this.list.map((one) => [one.id, one]));
    const fresh = found.map((one) => {
      const before = known.get(one.id);
      return before && JSON.stringify(before) === JSON.stringify(one) ? before : one;
    });
    const changed = new Map(some ? fresh.map((one) => [one.id, one]) : []);
    const list = some ? this.list.map((one) => changed.get(one.id) ?? one) : fresh;
    if (!sameThings(list, this.list)) this.list = list;
    this.loaded = true;
  }

  async tag(run: string, add: string[], remove: string[] = []): Promise<void> {
    await this.#change('POST', run, '/tags', { add, remove });
  }

  async setNote(run: string, text: string): Promise<void> {
    await this.#change('POST', run, '/note', { text });
  }

  async archive(run: string, back = false): Promise<void> {
    await this.#change('POST', run, '/archive', { back });
  }

  async remove(run: string): Promise<void> {
    await this.#change('DELETE', run, '');
  }

  async #change(method: string, run: string, what: string, body?: object): Promise<void> {
    await store.gateway.request(method, `${at(run)}${what}`, body);
    await this.load();
  }
}

/** Load a run with its start, its ranks and its timeline. */
export async function loadRun(id: string): Promise<RunDetails> {
  return await store.gateway.request('GET', at(id));
}

/** Load curves of a metric of a run. */
export async function loadCurves(
  run: string,
  metric: string,
  { by = 'step', points = 500, ranks = 'one', since, until }: { by?: 'step' | 'time'; points?: number; ranks?: 'one' | 'band' | 'each'; since?: number; until?: number } = {},
): Promise<RunCurves> {
  const search = new URLSearchParams({ by, points: String(points), ranks });
  if (since !== undefined) search.set('since', String(since));
  if (until !== undefined) search.set('until', String(until));
  return await store.gateway.request('GET', `${at(run)}/curves/${encodeURIComponent(metric)}?${search}`);
}

function at(run: string): string {
  return `runs/${encodeURIComponent(run)}`;
}

export const runs = new Runs();
