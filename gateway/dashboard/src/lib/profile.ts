/** Profiles: folded stacks as a tree, the boxes of a flame graph, and the functions as a list. */

import type { Gateway } from './api';

export const SECONDS = 10;

export interface Profile {
  replica: string;
  seconds: number;
  samples: number;
  left_out: number;
  sampler: string;
  folded: string;
}

/** A function where it was called from, with the samples in it and in what it called. */
export interface Call {
  name: string;
  samples: number;
  calls: Call[];
}

export interface Box {
  call: Call;
  /** From the outermost call to this one. */
  path: Call[];
  depth: number;
  /** Shares of the width, from 0 to 1. */
  left: number;
  width: number;
}

export interface FunctionTime {
  name: string;
  /** Samples in which it was on the stack. */
  total: number;
  /** Samples in which it was the innermost function. */
  own: number;
}

const NARROWEST = 0.0008; // share of the width below which a box is left out
const DEEPEST = 200;

export async function takeProfile(gateway: Gateway, replica: string): Promise<Profile> {
  return await gateway.request<Profile>('GET', `weaver/replicas/${encodeURIComponent(replica)}/profile?seconds=${SECONDS}`);
}

/** Return the calls of each of some folded stacks, and its samples. */
function stacksOf(folded: string): [names: string[], samples: number][] {
  return folded.split('\n').flatMap((line): [string[], number][] => {
    const at = line.lastIndexOf(' ');
    const samples = Number(line.slice(at + 1));
    return at > 0 && samples > 0 ? [[line.slice(0, at).split(';'), samples]] : [];
  });
}

/** Return the lines of folded stacks as one tree; its root stands for all of them. */
export function readFolded(folded: string): Call {
  const root: Call = { name: 'all', samples: 0, calls: [] };
  const known = new Map<Call, Map<string, Call>>();
  for (const [names, samples] of stacksOf(folded)) {
    let call = root;
    root.samples += samples;
    for (const name of names) {
      let there = known.get(call);
      if (!there) known.set(call, (there = new Map()));
      let next = there.get(name);
      if (!next) {
        next = { name, samples: 0, calls: [] };
        there.set(name, next);
        call.calls.push(next);
      }
      next.samples += samples;
      call = next;
    }
  }
  for (const call of known.keys()) call.calls.sort((one, other) => other.samples - one.samples);
  return root;
}

/** Return the boxes of a tree, zoomed to the last call of a path: those around it have the whole width. */
export function layOut(root: Call, zoom: readonly Call[]): Box[] {
  const boxes: Box[] = [];
  const around = zoom.length ? zoom : [root];
  around.forEach((call, depth) => boxes.push({ call, path: around.slice(0, depth + 1), depth, left: 0, width: 1 }));
  const place = (box: Box): void => {
    if (box.depth >= DEEPEST) return;
    let left = box.left;
    for (const call of box.call.calls) {
      const width = (call.samples / box.call.samples) * box.width;
      if (width < NARROWEST) break; // they are ordered
      const made = { call, path: [...box.path, call], depth: box.depth + 1, left, width };
      boxes.push(made);
      place(made);
      left += width;
    }
  };
  place(boxes.at(-1)!);
  return boxes;
}

/** Return the functions, the one with the most samples first. A recursive function counts once for each sample. */
export function functionTimes(folded: string): FunctionTime[] {
  const found = new Map<string, FunctionTime>();
  for (const [names, samples] of stacksOf(folded)) {
    for (const name of new Set(names)) {
      const one = found.get(name) ?? { name, total: 0, own: 0 };
      one.total += samples;
      found.set(name, one);
    }
    found.get(names.at(-1)!)!.own += samples;
  }
  return [...found.values()].sort((one, other) => other.total - one.total || other.own - one.own);
}

/** Return the function of a name such as `train (steps.py:12)`, without its place. */
export function functionName(name: string): string {
  return name.replace(/ \([^()]*\)$/, '');
}

/** Return a number from 0 to `count` - 1, which is the same for all functions of a file. */
export function colourOf(name: string, count: number): number {
  const file = /\(([^()]*?)(:\d+)?\)$/.exec(name)?.[1] ?? name;
  let sum = 0;
  for (let at = 0; at < file.length; at += 1) sum = (sum * 31 + file.charCodeAt(at)) >>> 0;
  return sum % count;
}
