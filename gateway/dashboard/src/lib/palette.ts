/** The command palette: what it finds, and in which order. */

export type PaletteKind = 'view' | 'run' | 'job' | 'replica' | 'session' | 'action';

export interface PaletteItem {
  /** Told apart by it. */
  key: string;
  kind: PaletteKind;
  title: string;
  hint?: string;
  /** Why it cannot be chosen now. */
  disabled?: string | null;
  act: () => void;
}

export const KIND_NAMES: Record<PaletteKind, string> = {
  action: 'Actions',
  view: 'Views',
  run: 'Runs',
  job: 'Jobs',
  replica: 'Replicas',
  session: 'Sessions',
};

const OF_KIND = 8; // that are shown of each kind
const WORD = 3;
const INSIDE = 2;
const SCATTERED = 1;

/** Return how well a title fits some words, the better the larger; 0 if it does not. Each word has to be in it, a short one also scattered. */
export function fit(words: readonly string[], title: string): number {
  const text = title.toLowerCase();
  let sum = words.length ? 0 : 1;
  for (const word of words) {
    const at = text.indexOf(word);
    const score = at === 0 ? WORD + 1 : at > 0 && /[^\p{L}\d]/u.test(text[at - 1]!) ? WORD : at > 0 ? INSIDE : isScattered(word, text) ? SCATTERED : 0;
    if (!score) return 0;
    sum += score;
  }
  return sum;
}

function isScattered(word: string, text: string): boolean {
  if (word.length < 2 || word.length > 20) return false;
  let from = 0;
  for (const sign of word) {
    from = text.indexOf(sign, from) + 1;
    if (!from) return false;
  }
  return true;
}

export function wordsOf(query: string): string[] {
  return query.toLowerCase().split(/\s+/).filter(Boolean);
}

/** Return the items that fit a query, some of each kind; the kind of the best one comes first. */
export function findItems(query: string, items: readonly PaletteItem[]): PaletteItem[] {
  const words = wordsOf(query);
  const found = items.flatMap((item, at) => {
    const score = fit(words, `${item.title} ${item.hint ?? ''}`);
    return score ? [{ item, at, score: words.length ? score - Math.min(0.9, item.title.length / 200) : 0 }] : [];
  });
  found.sort((one, other) => other.score - one.score || one.at - other.at);
  const kinds = new Map<PaletteKind, PaletteItem[]>();
  for (const { item } of found) {
    const known = kinds.get(item.kind);
    if (!known) kinds.set(item.kind, [item]);
    else if (known.length < OF_KIND) known.push(item);
  }
  return [...kinds.values()].flat();
}

const VERBS = { pause: 'Pause', resume: 'Resume', save: 'Save', evaluate: 'Evaluate', drain: 'Drain' } as const;

export type Verb = keyof typeof VERBS;

/** Return the command with which a query begins, such as `pause train_0`, and the rest of it; null if it begins with none. */
export function verbOf(query: string): { verb: Verb; title: string; rest: string } | null {
  const match = /^\s*(\w+)\s+(\S.*)$/.exec(query);
  const verb = match?.[1]!.toLowerCase();
  return verb !== undefined && Object.hasOwn(VERBS, verb) ? { verb: verb as Verb, title: VERBS[verb as Verb], rest: match![2]! } : null;
}
