/** Values of a configuration: fields for the types that replicas name, and text as values. */

export interface Field {
  /** bool and choice have a list; the others are text. */
  input: 'number' | 'text' | 'choice' | 'json';
  choices: string[];
}

/** Return the field for a type's name, such as `float`, `bool`, `int | None` or `Mode(fast, slow)`. */
export function fieldOf(type: string): Field {
  const plain = type.replace(/\s*\|\s*None$/, '').trim();
  if (plain === 'bool') return { input: 'choice', choices: ['true', 'false'] };
  if (plain === 'int' || plain === 'float') return { input: 'number', choices: [] };
  if (plain === 'str') return { input: 'text', choices: [] };
  const literals = literalsOf(plain);
  if (literals) return { input: 'choice', choices: literals.map(([text]) => text) };
  const named = /^\w+\((.+)\)$/.exec(plain);
  if (named) return { input: 'choice', choices: named[1]!.split(',').map((one) => one.trim()) };
  return { input: 'json', choices: [] };
}

/** Return the texts and values of a type such as `'fast' | 'slow'` or `1 | 2`; null if it is another type. */
function literalsOf(type: string): [string, unknown][] | null {
  const found: [string, unknown][] = [];
  for (const one of type.split(' | ')) {
    const quoted = /^'([^'\\]*)'$/.exec(one);
    if (quoted) found.push([quoted[1]!, quoted[1]]);
    else if (/^-?\d+(\.\d+)?$/.test(one)) found.push([one, Number(one)]);
    else return null;
  }
  return found;
}

export type Parsed = { ok: true; value: unknown } | { ok: false; why: string };

/** Return the value that a text stands for, by the type's name. The replica checks it too. */
export function parseValue(text: string, type: string): Parsed {
  const given = text.trim();
  const plain = type.replace(/\s*\|\s*None$/, '').trim();
  if (plain !== type && /^(null|None)$/.test(given)) return { ok: true, value: null };
  if (plain === 'str') return { ok: true, value: text };
  if (!given) return { ok: false, why: 'a value is missing' };
  if (plain === 'int' || plain === 'float') {
    const read = Number(given.replaceAll('_', ''));
    if (!Number.isFinite(read)) return { ok: false, why: `${given} is no number` };
    if (plain === 'int' && !Number.isSafeInteger(read)) return { ok: false, why: `${given} is no whole number` };
    return { ok: true, value: read };
  }
  if (plain === 'bool') {
    const read = given.toLowerCase();
    return read === 'true' || read === 'false'
      ? { ok: true, value: read === 'true' }
      : { ok: false, why: 'true or false is needed' };
  }
  const literal = literalsOf(plain)?.find(([one]) => one === given);
  if (literal) return { ok: true, value: literal[1] };
  if (/^\w+\(.+\)$/.test(plain)) return { ok: true, value: given };
  try {
    return { ok: true, value: JSON.parse(given) };
  } catch {
    return { ok: true, value: given };
  }
}

export interface Key {
  name: string;
  type: string;
  /** The number of the replicas that take the key. */
  takers: number;
  /** The current values and how many replicas have each, the most frequent first. */
  values: { text: string; count: number }[];
}

interface Configured {
  handlers: Record<string, string>;
  config: Record<string, unknown>;
}

/** Return the keys that some of the replicas take, with their current values. */
export function keysOf(replicas: readonly Configured[], show: (value: unknown) => string): Key[] {
  const found = new Map<string, { type: string; takers: number; values: Map<string, number> }>();
  for (const one of replicas)
    for (const [name, type] of Object.entries(one.handlers)) {
      const entry = found.get(name) ?? { type, takers: 0, values: new Map<string, number>() };
      entry.takers += 1;
      if (name in one.config) {
        const text = show(one.config[name]);
        entry.values.set(text, (entry.values.get(text) ?? 0) + 1);
      }
      found.set(name, entry);
    }
  return [...found]
    .map(([name, { type, takers, values }]) => ({
      name,
      type,
      takers,
      values: [...values].map(([text, count]) => ({ text, count })).sort((one, other) => other.count - one.count),
    }))
    .sort((one, other) => other.takers - one.takers || (one.name < other.name ? -1 : 1));
}

/** Return the values that replicas have for a key, the most frequent first, in a line of text. */
export function describeValues(key: Key): string {
  const { values } = key;
  const shown = values.slice(0, 3).map((one) => `${one.text}${values.length > 1 ? ` (${one.count})` : ''}`);
  return shown.join(', ') + (values.length > 3 ? ` and ${values.length - 3} more` : '');
}

const PARTS = 100; // of a slider, for each factor of ten

/** Return the place on a slider of a value: 0 at the present one, and 100 for each factor of ten; null if there can be none. */
export function sliderPlace(value: number, present: number): number | null {
  return present > 0 && value > 0 ? Math.max(-PARTS, Math.min(PARTS, Math.round(Math.log10(value / present) * PARTS))) : null;
}

/** Return the value at a place of a slider, with two digits, so that it can be read. */
export function sliderValue(place: number, present: number, type: string): string {
  if (place === 0) return String(present);
  const value = present * 10 ** (place / PARTS);
  return /^int\b/.test(type) ? String(Math.max(1, Math.round(value))) : String(Number(value.toPrecision(2)));
}

/**
 * Return what a new value means for the key's schedule, and how it compares to the present one; nothing to say is empty.
 *
 * @param config the configuration of one replica, with `KEY_schedule` for the schedule's own value while another one holds
 * @param takes the keys that can be changed
 */
export function meaningOf(key: string, value: unknown, config: Readonly<Record<string, unknown>>, takes: readonly string[]): string {
  const present = config[key];
  const base = key.replace(/_factor$/, '');
  if (base !== key && typeof value === 'number') {
    const known = config[`${base}_schedule`] ?? (typeof config[base] === 'number' ? config[base] / (Number(present) || 1) : undefined);
    return typeof known === 'number' ? `${base} is the schedule's × ${value}: now ${Number((known * value).toPrecision(4))}` : `${base} is the schedule's × ${value}`;
  }
  const scheduled = config[`${key}_schedule`];
  const hides = scheduled !== undefined || takes.includes(`${key}_factor`);
  if (value === null) return hides ? `the schedule's value again${scheduled === undefined ? '' : `, now ${String(scheduled)}`}` : '';
  const parts = [];
  if (typeof value === 'number' && typeof present === 'number' && present !== 0 && value !== present) parts.push(`× ${Number((value / present).toPrecision(3))}`);
  if (hides) parts.push(`holds in place of the schedule's${scheduled === undefined ? '' : ` ${String(scheduled)}`} until it is taken back`);
  return parts.join('; ');
}
