/**
 * What the page has the gateway send: aggregates always, and the columns and whole rows that components need now.
 *
 * Components announce what they need and withdraw it; the gateway gets one message for all, at most some times a second.
 */

import type { Outgoing } from '../types';
import type { Column } from './frames';

export interface Need {
  columns?: readonly Column[];
  /** The ids of replicas. */
  rows?: readonly string[];
}

const MOST_ROWS = 200;
const LONGEST = 500; // characters of an id
const MOST_TEXT = 40_000; // characters of all ids: the gateway takes messages of 64 KiB
const SETTLE = 30; // milliseconds in which a change of the view announces all its needs
const EVERY = 300;

export class Subscriptions {
  #send: (message: Outgoing) => boolean;
  #fresh: (row: string) => void;
  #needs = new Set<Need>();
  #timer: ReturnType<typeof setTimeout> | undefined;
  #sent: { columns: ReadonlySet<Column>; rows: ReadonlySet<string> } | null = null; // null: nothing on this socket
  #opening = false; // whether the gateway still has to say how the feed begins on this socket
  #when = 0;
  #count = 0;
  #last = ''; // the id of the last subscription
  /** What has come whole since it was subscribed, so that its changes are enough after a lost connection. */
  #whole = new Set<Column | 'aggregates'>();

  /**
   * @param send sends a message, and returns whether there was a connection
   * @param fresh is told of each row that is subscribed anew
   */
  constructor(send: (message: Outgoing) => boolean, fresh: (row: string) => void) {
    this.#send = send;
    this.#fresh = fresh;
  }

  /** Announce a need; the returned function withdraws it. */
  need(need: Need): () => void {
    this.#needs.add(need);
    this.changed();
    return () => {
      this.#needs.delete(need);
      this.changed();
    };
  }

  /** Whether the gateway was asked for a column. */
  has(column: Column): boolean {
    return this.#sent?.columns.has(column) ?? false;
  }

  /** Subscribe on a new socket; with `resuming` it goes on where the last one was lost. */
  opened(resuming: boolean): void {
    this.#sent = null;
    this.#opening = true;
    if (resuming && this.#whole.size) {
      // Of these the gateway sends what has changed meanwhile. All else has to be subscribed anew.
      const columns = [...this.#whole].filter((one) => one !== 'aggregates');
      this.#send({ type: 'subscribe', id: this.#id(), aggregates: this.#whole.has('aggregates'), columns, rows: [] });
      this.#sent = { columns: new Set(columns), rows: new Set() };
    } else this.#whole.clear();
    this.#now();
  }

  closed(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    this.#sent = null;
  }

  /** Note how the feed begins; a feed that begins anew on the same socket knows nothing of what was subscribed. */
  begun(anew: boolean): void {
    if (anew) this.#whole.clear();
    if (anew && !this.#opening && this.#sent) {
      this.#send({ type: 'subscribe', id: this.#id(), aggregates: false, columns: [], rows: [] });
      this.#sent = { columns: new Set(), rows: new Set() };
      this.#now();
    }
    this.#opening = false;
  }

  /** Note that the gateway refused a message: a refused subscription is sent again without its rows, which it may not like. */
  refused(id: string): void {
    if (id !== this.#last || !this.#sent?.rows.size) return;
    this.#send({ type: 'subscribe', id: this.#id(), aggregates: true, columns: [...this.#sent.columns], rows: [] });
    this.#last = ''; // once is enough
  }

  /** Note that all of something has come. */
  came(what: Column | 'aggregates'): void {
    if (what === 'aggregates' || this.has(what)) this.#whole.add(what);
  }

  /** Send a new subscription soon, if what is needed has changed. */
  changed(): void {
    if (this.#timer !== undefined || this.#sent === null) return;
    const wait = Math.max(SETTLE, this.#when + EVERY - Date.now());
    this.#timer = setTimeout(() => {
      this.#timer = undefined;
      const { columns, rows } = this.#wanted();
      if (this.#sent && !(same(columns, this.#sent.columns) && same(rows, this.#sent.rows))) this.#now();
    }, wait);
  }

  #now(): void {
    const { columns, rows } = this.#wanted();
    this.#when = Date.now();
    const before = this.#sent;
    for (const one of this.#whole) if (one !== 'aggregates' && !columns.has(one)) this.#whole.delete(one);
    for (const one of rows) if (!before?.rows.has(one)) this.#fresh(one);
    const sent = this.#send({ type: 'subscribe', id: this.#id(), aggregates: true, columns: [...columns], rows: [...rows] });
    this.#sent = sent ? { columns, rows } : null;
  }

  /** A hidden page needs aggregates alone. */
  #wanted(): { columns: Set<Column>; rows: Set<string> } {
    const columns = new Set<Column>();
    const rows = new Set<string>();
    if (document.hidden) return { columns, rows };
    let text = 0;
    for (const need of this.#needs) {
      for (const one of need.columns ?? []) columns.add(one);
      for (const one of need.rows ?? []) {
        if (rows.size >= MOST_ROWS || one.length > LONGEST || text + one.length > MOST_TEXT || rows.has(one)) continue;
        text += one.length;
        rows.add(one);
      }
    }
    return { columns, rows };
  }

  #id(): string {
    this.#count += 1;
    this.#last = `subscription-${this.#count}`;
    return this.#last;
  }
}

function same<T>(one: ReadonlySet<T>, other: ReadonlySet<T>): boolean {
  return one.size === other.size && [...one].every((item) => other.has(item));
}
