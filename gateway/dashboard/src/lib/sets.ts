/** Return things by the value of a key, in the order of their first ones. */
export function grouped<T, K>(things: Iterable<T>, keyOf: (thing: T) => K): Map<K, T[]> {
  const groups = new Map<K, T[]>();
  for (const thing of things) {
    const key = keyOf(thing);
    const known = groups.get(key);
    if (known) known.push(thing);
    else groups.set(key, [thing]);
  }
  return groups;
}

/** Return a set with some things, or without them if it has them all. */
export function toggled<T>(things: ReadonlySet<T>, some: readonly T[]): Set<T> {
  const changed = new Set(things);
  const every = some.every((one) => changed.has(one));
  for (const one of some) changed[every ? 'delete' : 'add'](one);
  return changed;
}

/** Return what gives the list before as long as a new one has the same things: who reads it sees no change. */
export function steady<T>(): (fresh: readonly T[]) => readonly T[] {
  let known: readonly T[] = [];
  return (fresh) => (known = sameThings(fresh, known) ? known : fresh);
}

/** Return an object with those parts of a known one that are equal in both: what reads only these sees no change. */
export function keptParts<T extends object>(known: T | null, fresh: T): T {
  if (known === null) return fresh;
  const made = { ...fresh };
  for (const name in made) if (JSON.stringify(known[name]) === JSON.stringify(made[name])) made[name] = known[name];
  return made;
}

/** Whether two lists have the same things in the same order. */
export function sameThings<T>(one: readonly T[], other: readonly T[]): boolean {
  return one.length === other.length && one.every((each, at) => each === other[at]);
}
