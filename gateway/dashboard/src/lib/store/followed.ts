/** What is kept of replicas as long as somebody looks at them. */

export class Followed<T> {
  #kept = new Map<string, { readers: number; value: T }>();
  #make: () => T;

  /** @param make makes what is kept of a replica at first */
  constructor(make: () => T) {
    this.#make = make;
  }

  /** Keep a value for a replica until the returned function is called by all that follow it. */
  follow(id: string): () => void {
    const kept = this.#kept.get(id) ?? { readers: 0, value: this.#make() };
    kept.readers += 1;
    this.#kept.set(id, kept);
    return () => {
      kept.readers -= 1;
      if (kept.readers === 0) this.#kept.delete(id);
    };
  }

  get(id: string): T | undefined {
    return this.#kept.get(id)?.value;
  }
}
