/** The columns that were chosen for the table of runs: in the address, and kept in the browser. */

import { keep, kept } from './kept';
import { router } from './router.svelte';

const KEPT = 'loom.runs.columns';

/** Return the chosen columns; null if none were. */
export function chosenColumns(): string[] | null {
  const given = router.route.query['cols'] ?? kept(KEPT);
  return given ? given.split(',').map(decodeURIComponent) : null;
}

/** Choose columns; null: those that fit the runs. */
export function chooseColumns(columns: readonly string[] | null): void {
  const text = columns?.map(encodeURIComponent).join(',') ?? null;
  keep(KEPT, text);
  router.set({ cols: text });
}
