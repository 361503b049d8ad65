/** The columns that were chosen for the table of runs: in the address, and kept in the browser. */

import { router } from './router.svelte';

const KEPT = 'loom.runs.columns';

/** Return the chosen columns; null if none were. */
export function chosenColumns(): string[] | null {
  const given = router.route.query['cols'] ?? kept();
  return given ? given.split(',').map(decodeURIComponent) : null;
}

/** Choose columns; null: those that fit the runs. */
export function chooseColumns(columns: readonly string[] | null): void {
  const text = columns?.map(encodeURIComponent).join(',') ?? null;
  try {
    if (text === null) localStorage.removeItem(KEPT);
    else localStorage.setItem(KEPT, text);
  } catch {
    // A sandboxed frame has no storage: the address has the choice.
  }
  router.set({ cols: text });
}

function kept(): string | null {
  try {
    return localStorage.getItem(KEPT);
  } catch {
    return null;
  }
}
