/**
 * The filter of runs: a name or glob, or an expression such as `loss < 0.3 and "optim/lr" >= 1e-4 and tag == "best"`.
 *
 * A comparison has a key at the left and a value at the right. Keys with other signs than letters, digits, dots, slashes
 * and underscores stand in quotes or backticks. `~` compares with a glob.
 */

import { globToRegExp, isGlob } from './glob';
import { candidatesOf, textsOf } from './runvalues';
import type { Run } from './types';

export interface RunFilter {
  /** The keys that an expression compares. */
  keys: readonly string[];
  matches(run: Run): boolean;
}

/** An expression that cannot be read, and the place of its first sign that does not fit. */
export class FilterError extends Error {
  constructor(
    message: string,
    readonly at: number,
  ) {
    super(`${message} (at character ${at + 1})`);
  }
}

type Test = (run: Run) => boolean;
type Literal = string | number | boolean | null;
type Kind = 'word' | 'key' | 'text' | 'number' | 'operator' | 'end';

interface Token {
  kind: Kind;
  text: string;
  at: number;
}

const OPERATORS = ['==', '!=', '<=', '>=', '<', '>', '~', '(', ')'];
const COMPARISONS = ['==', '!=', '<=', '>=', '<', '>', '~'];
const INSTEAD: Record<string, string> = { '=': '==', '&': 'and', '|': 'or', '!': 'not' };
const CONSTANTS: Record<string, Literal> = {
  true: true,
  True: true,
  false: false,
  False: false,
  none: null,
  None: null,
  null: null,
  nan: NaN,
  NaN: NaN,
  inf: Infinity,
  Infinity,
};
const DEEPEST = 100; // brackets and negations in each other

/**
 * Return the filter of a text. Without an operator it is a part of a name, tag or id, or a glob over them.
 *
 * @throws FilterError if an expression cannot be read
 */
export function parseFilter(text: string): RunFilter {
  const wanted = text.trim();
  if (!/[<>=~]/.test(wanted)) return { keys: [], matches: byName(wanted) };
  return new Parser(text).filter();
}

function byName(wanted: string): Test {
  if (!wanted) return () => true;
  if (isGlob(wanted)) {
    const pattern = globToRegExp(wanted);
    return (run) => namesOf(run).some((one) => pattern.test(one));
  }
  const part = wanted.toLowerCase();
  return (run) => namesOf(run).some((one) => one.toLowerCase().includes(part));
}

const namesOf = (run: Run): string[] => [run.name, run.id, ...run.groups, ...run.tags];

class Parser {
  #text: string;
  #tokens: Token[];
  #next = 0;
  #depth = 0;
  #keys = new Set<string>();

  constructor(text: string) {
    this.#text = text;
    this.#tokens = tokensOf(text);
  }

  filter(): RunFilter {
    const matches = this.#any();
    const rest = this.#peek();
    if (rest.kind !== 'end') throw new FilterError(`${shown(rest)} is not expected here: join comparisons with and, or`, rest.at);
    return { keys: [...this.#keys], matches };
  }

  #peek(): Token {
    return this.#tokens[this.#next]!;
  }

  #take(kind: Kind, text: string): boolean {
    const found = this.#peek();
    if (found.kind !== kind || (kind === 'word' ? found.text.toLowerCase() : found.text) !== text) return false;
    this.#next += 1;
    return true;
  }

  #any(): Test {
    const parts = [this.#all()];
    while (this.#take('word', 'or')) parts.push(this.#all());
    return parts.length === 1 ? parts[0]! : (run) => parts.some((one) => one(run));
  }

  #all(): Test {
    const parts = [this.#not()];
    while (this.#take('word', 'and')) parts.push(this.#not());
    return parts.length === 1 ? parts[0]! : (run) => parts.every((one) => one(run));
  }

  #not(): Test {
    const { at } = this.#peek();
    if (++this.#depth > DEEPEST) throw new FilterError(`more than ${DEEPEST} brackets and negations are in each other`, at);
    try {
      if (this.#take('word', 'not')) {
        const test = this.#not();
        return (run) => !test(run);
      }
      if (!this.#take('operator', '(')) return this.#comparison();
      const test = this.#any();
      if (!this.#take('operator', ')')) throw new FilterError('the bracket is not closed', at);
      return test;
    } finally {
      this.#depth -= 1;
    }
  }

  #comparison(): Test {
    const key = this.#peek();
    if (key.kind !== 'word' && key.kind !== 'key' && key.kind !== 'text')
      throw new FilterError(`${shown(key)}: a key is expected, such as loss or "optim/lr"`, key.at);
    this.#next += 1;
    const operator = this.#peek();
    if (operator.kind !== 'operator' || !COMPARISONS.includes(operator.text))
      throw new FilterError(`${shown(operator)}: a comparison is expected after ${key.text}, one of ${COMPARISONS.join(' ')}`, operator.at);
    this.#next += 1;
    const value = this.#value();
    this.#keys.add(key.text);
    return comparing(key.text, operator.text, value, operator.at);
  }

  #value(): Literal {
    const found = this.#peek();
    this.#next += 1;
    if (found.kind === 'text') return found.text;
    if (found.kind === 'number') return Number(found.text.replaceAll('_', ''));
    if (found.kind === 'word' && Object.hasOwn(CONSTANTS, found.text)) return CONSTANTS[found.text]!;
    if (found.kind === 'word') throw new FilterError(`${shown(found)} is no value: write texts in quotes, "${found.text}"`, found.at);
    throw new FilterError(`${shown(found)}: a value is expected, such as 0.3, "completed", true or none`, Math.min(found.at, this.#text.length));
  }
}

const shown = (token: Token): string => (token.kind === 'end' ? 'the end' : token.text);

const NUMBER = /[-+]?(?:inf\b|(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)/y;
const WORD = /[\p{L}_][\p{L}\d_./]*/uy;

function tokensOf(text: string): Token[] {
  const tokens: Token[] = [];
  let at = 0;
  const match = (pattern: RegExp): string | undefined => {
    pattern.lastIndex = at;
    return pattern.exec(text)?.[0];
  };
  while (at < text.length) {
    const sign = text[at]!;
    if (/\s/.test(sign)) {
      at += 1;
      continue;
    }
    if (sign === '"' || sign === "'" || sign === '`') {
      const [found, end] = quoted(text, at);
      tokens.push({ kind: sign === '`' ? 'key' : 'text', text: found, at });
      at = end;
      continue;
    }
    const operator = OPERATORS.find((one) => text.startsWith(one, at));
    const found = operator ?? match(NUMBER) ?? match(WORD);
    if (found === undefined) {
      const other = INSTEAD[sign];
      throw new FilterError(other ? `${sign} is no operator: write ${other}` : `${sign} is not expected here`, at);
    }
    tokens.push({ kind: operator ? 'operator' : /^[\p{L}_]/u.test(found) ? 'word' : 'number', text: found.replace(/^([-+]?)inf$/, '$1Infinity'), at });
    at += found.length;
  }
  tokens.push({ kind: 'end', text: '', at: text.length });
  return tokens;
}

/** Return the text between quotes, in which a backslash stands before a sign that is taken as it is, and where it ends. */
function quoted(text: string, from: number): [text: string, end: number] {
  let found = '';
  for (let at = from + 1; at < text.length; at += 1) {
    if (text[at] === text[from]) return [found, at + 1];
    if (text[at] === '\\' && at + 1 < text.length) at += 1;
    found += text[at];
  }
  throw new FilterError(`the quote ${text[from]} is not closed`, from);
}

function comparing(key: string, operator: string, value: Literal, at: number): Test {
  if (operator === '~') {
    if (typeof value !== 'string') throw new FilterError('~ compares with a glob: write it in quotes, such as "sft*"', at);
    const pattern = globToRegExp(value);
    return (run) => textsOf(run, key).some((one) => pattern.test(one));
  }
  const equal: Test = (run) => equals(candidatesOf(run, key), value);
  if (operator === '==') return equal;
  if (operator === '!=') return (run) => !equal(run);
  if (value === null || typeof value === 'boolean') throw new FilterError(`${operator} compares numbers and texts: compare with == or !=`, at);
  const wanted = ORDERS[operator]!;
  return (run) => {
    for (const one of candidatesOf(run, key)) {
      const [left, right] = comparable(one, value);
      if (left !== null && typeof left === typeof right) return wanted(left, right);
    }
    return false;
  };
}

const ORDERS: Record<string, (left: string | number, right: string | number) => boolean> = {
  '<': (left, right) => left < right,
  '<=': (left, right) => left <= right,
  '>': (left, right) => left > right,
  '>=': (left, right) => left >= right,
};

function equals(candidates: readonly unknown[], value: Literal): boolean {
  if (value === null) return candidates.every((one) => one == null || (Array.isArray(one) && !one.length));
  const [first] = candidates.filter((one) => one != null && (Array.isArray(one) || one instanceof Date || typeof one === typeof value));
  if (Array.isArray(first)) return first.includes(value);
  const [left, right] = comparable(first, value);
  return Object.is(left, right) || left === right;
}

/** A time is compared with a date in quotes, or with seconds since the epoch. */
function comparable(found: unknown, value: string | number | boolean): [string | number | null, string | number] {
  if (found instanceof Date) return [found.getTime() / 1000, typeof value === 'string' ? Date.parse(value) / 1000 : Number(value)];
  if (typeof value === 'boolean') return [typeof found === 'boolean' ? Number(found) : null, Number(value)];
  return [typeof found === 'string' || typeof found === 'number' ? found : null, value];
}
