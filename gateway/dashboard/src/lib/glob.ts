/** Names and globs, with the rules of Python's fnmatch, and the replicas that a target names. */

import { ENDED, type Target } from './types';

export function isGlob(text: string): boolean {
  return /[*?[]/.test(text);
}

/** Return the regular expression of a glob: `*`, `?`, `[abc]` and `[!abc]`. */
export function globToRegExp(glob: string): RegExp {
  let pattern = '';
  for (let at = 0; at < glob.length; at += 1) {
    const one = glob[at]!;
    if (one === '*') {
      if (!pattern.endsWith('.*')) pattern += '.*';
    } else if (one === '?') pattern += '.';
    else if (one === '[') {
      const end = endOfSet(glob, at + 1);
      if (end < 0) pattern += '\\[';
      else {
        const set = glob.slice(at + 1, end);
        const negated = set.startsWith('!');
        pattern += `[${negated ? '^' : ''}${(negated ? set.slice(1) : set).replace(/[\\\]^]/g, '\\$&')}]`;
        at = end;
      }
    } else pattern += one.replace(/[.*+?^${}()|[\]\\/]/g, '\\$&');
  }
  try {
    return new RegExp(`^(?:${pattern})$`, 's');
  } catch {
    return /(?!)/; // a set such as [z-a] matches nothing
  }
}

function endOfSet(glob: string, from: number): number {
  let at = from;
  if (glob[at] === '!') at += 1;
  if (glob[at] === ']') at += 1;
  return glob.indexOf(']', at);
}

interface Named {
  id: string;
  group: string;
  state: string;
}

const shortOf = (id: string): string => {
  const at = id.indexOf('@');
  return at > 0 ? id.slice(0, at) : id;
};

/** Return the replicas that a target names, as the weaver selects them: only an id names one that has ended. */
export function selectTargets<R extends Named>(target: Target, replicas: ReadonlyMap<string, R>): R[] {
  if (Array.isArray(target)) return target.flatMap((id) => replicas.get(id) ?? []);
  const exact = replicas.get(target);
  if (exact) return [exact];
  const living = [...replicas.values()].filter((one) => !ENDED.has(one.state));
  if (target === '*') return living;
  const pattern = globToRegExp(target);
  return living.filter((one) => pattern.test(one.id) || pattern.test(shortOf(one.id)) || pattern.test(one.group));
}

/** Return whether a search finds a replica: by a glob over names, or by a part of a name. */
export function searchFor(text: string): (one: { id: string; group: string; host: string }) => boolean {
  const wanted = text.trim();
  if (!wanted) return () => true;
  if (isGlob(wanted)) {
    const pattern = globToRegExp(wanted);
    return (one) => pattern.test(one.id) || pattern.test(shortOf(one.id)) || pattern.test(one.group);
  }
  const part = wanted.toLowerCase();
  return (one) =>
    one.id.toLowerCase().includes(part) || one.group.toLowerCase().includes(part) || one.host.toLowerCase().includes(part);
}

/** Return the action of a group when a device fails: its own, or that of the newest glob that matches. */
export function actionOf(group: string, policies: Readonly<Record<string, string>>): string {
  if (Object.hasOwn(policies, group)) return policies[group]!;
  for (const [pattern, action] of Object.entries(policies).reverse())
    if (globToRegExp(pattern).test(group)) return action;
  return 'notify';
}
