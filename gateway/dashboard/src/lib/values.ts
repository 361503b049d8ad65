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
