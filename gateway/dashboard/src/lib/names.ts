/** Sets of names as short text for the address: runs of numbers are written as ranges. */

const NUMBERED = /^([^@]*?)(0|[1-9]\d*)(@.*)?$/s;

/** Return names as text: `train_{0-3,7}@s,other`. */
export function packNames(names: Iterable<string>): string {
  const runs = new Map<string, { before: string; after: string; numbers: number[] }>();
  const packed: string[] = [];
  for (const name of names) {
    const match = NUMBERED.exec(name);
    if (!match) {
      packed.push(encode(name));
      continue;
    }
    const [, before = '', digits = '', after = ''] = match;
    const key = JSON.stringify([before, after]);
    const run = runs.get(key) ?? { before, after, numbers: [] };
    run.numbers.push(Number(digits));
    runs.set(key, run);
  }
  for (const { before, after, numbers } of runs.values()) {
    if (numbers.length === 1) packed.push(encode(`${before}${numbers[0]}${after}`));
    else packed.push(`${encode(before)}{${ranges(numbers)}}${encode(after)}`);
  }
  return packed.join(',');
}

/** Return the names in a text of `packNames`; text that it did not write gives names that no replica has. */
export function unpackNames(text: string, most = 20_000): string[] {
  const names: string[] = [];
  for (const part of text.match(/(?:[^,{}]|\{[^{}]*\})+/g) ?? []) {
    const match = /^([^{}]*)\{([\d,.-]*)\}([^{}]*)$/.exec(part);
    if (!match) names.push(decode(part));
    else
      for (const range of match[2]!.split(',')) {
        const [first, last = first] = range.split('-').map(Number);
        for (let one = first!; one <= last! && names.length < most; one += 1)
          names.push(`${decode(match[1]!)}${one}${decode(match[3]!)}`);
      }
    if (names.length >= most) break;
  }
  return names;
}

function ranges(numbers: number[]): string {
  const sorted = [...new Set(numbers)].sort((one, other) => one - other);
  const found: string[] = [];
  let first = sorted[0]!;
  let last = first;
  for (const one of [...sorted.slice(1), NaN]) {
    if (one === last + 1) last = one;
    else {
      found.push(first === last ? String(first) : `${first}-${last}`);
      first = last = one;
    }
  }
  return found.join(',');
}

const encode = (text: string): string => text.replace(/[%,{}]/g, (one) => `%${one.charCodeAt(0).toString(16)}`);

function decode(text: string): string {
  return text.replace(/%(25|2c|7b|7d)/gi, (_, code: string) => String.fromCharCode(parseInt(code, 16)));
}
