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

/** Whether two lists have the same things in the same order. */
export function sameThings<T>(one: readonly T[], other: readonly T[]): boolean {
  return one.length === other.length && one.every((each, at) => each === other[at]);
}
