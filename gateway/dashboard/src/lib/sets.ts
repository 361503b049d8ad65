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

/** Return a set with a thing that it lacks, or without it. */
export function toggled<T>(things: ReadonlySet<T>, thing: T): ReadonlySet<T> {
  const changed = new Set(things);
  if (!changed.delete(thing)) changed.add(thing);
  return changed;
}
