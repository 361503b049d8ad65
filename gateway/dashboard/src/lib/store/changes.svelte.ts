/** Counters of changes, one for each subject: components read them, and are told of changes at most some times a second. */

const SETTLE = 20; // milliseconds in which messages that belong together come
const EVERY = 100; // milliseconds between two times that components are told of a subject
const HIDDEN = 1000; // as long as the page is hidden
const LATER = 700; // for which something waits for a change: the gateway sends one every half a second

export class Changes<Subject extends string> {
  #counts: Record<Subject, number>;
  #every: (subject: Subject) => number | undefined;
  #telling: () => void;
  #noted = new Set<Subject>();
  #told = new Map<Subject, number>();
  #later: (() => void)[] = [];
  #timer: ReturnType<typeof setTimeout> | undefined;
  #due = Infinity;

  /**
   * @param subjects all subjects
   * @param every returns the milliseconds between two times for those that are costly to follow
   * @param telling is called before components are told of changes
   */
  constructor(subjects: readonly Subject[], every: (subject: Subject) => number | undefined, telling: () => void) {
    const counts = $state(Object.fromEntries(subjects.map((one) => [one, 0])) as Record<Subject, number>);
    this.#counts = counts;
    this.#every = every;
    this.#telling = telling;
  }

  /** Return a number that changes when the subject does, and depend on it. */
  read(subject: Subject): number {
    return this.#counts[subject];
  }

  note(...subjects: readonly Subject[]): void {
    let due = Infinity;
    for (const one of subjects) {
      this.#noted.add(one);
      due = Math.min(due, this.#dueOf(one));
    }
    if (due < this.#due) this.#schedule(due);
  }

  /** Note subjects that have changed together, of which components are told together. */
  noteAll(...subjects: readonly Subject[]): void {
    for (const one of subjects) this.#told.delete(one);
    this.note(...subjects);
  }

  /** Call a function when components are next told of a change, or soon. */
  later(act: () => void): void {
    this.#later.push(act);
    const due = Date.now() + LATER;
    if (due < this.#due) this.#schedule(due);
  }

  #dueOf(subject: Subject): number {
    return (this.#told.get(subject) ?? 0) + (this.#every(subject) ?? EVERY);
  }

  #schedule(due: number): void {
    clearTimeout(this.#timer);
    this.#due = due;
    const wait = Math.max(SETTLE, due - Date.now());
    // A hidden page gets no frames, and needs few updates.
    if (document.hidden) this.#timer = setTimeout(() => this.#tell(), Math.max(wait, HIDDEN));
    else this.#timer = setTimeout(() => requestAnimationFrame(() => this.#tell()), wait);
  }

  #tell(): void {
    const now = Date.now();
    this.#telling();
    this.#act();
    for (const one of this.#noted) {
      if (this.#dueOf(one) > now) continue;
      this.#noted.delete(one);
      this.#told.set(one, now);
      this.#counts[one] += 1;
    }
    this.#due = Infinity;
    if (this.#noted.size) this.#schedule(Math.min(...[...this.#noted].map((one) => this.#dueOf(one))));
  }

  #act(): void {
    for (const act of this.#later.splice(0)) act();
  }

  /** Tell components now of all that has changed. */
  flush(): void {
    clearTimeout(this.#timer);
    this.#due = Infinity;
    this.#act();
    for (const one of this.#noted) this.#counts[one] += 1;
    this.#noted.clear();
  }
}
