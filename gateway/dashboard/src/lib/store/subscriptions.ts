/**
 * What the page has the gateway send: aggregates always, and the columns, whole rows and devices that components need now.
 *
 * Components announce what they need and withdraw it; the gateway gets one message for all, at most some times a second.
 */

import type { Outgoing } from '../types';
import type { Column } from './frames';

export interface Need {
  columns?: readonly Column[];
  /** The ids of replicas. */
  rows?: readonly string[];
  /** The uuids of devices whose status is shown. */
  devices?: readonly string[];
}

interface Wanted {
  columns: ReadonlySet<Column>;
  rows: ReadonlySet<string>;
  devices: ReadonlySet<string>;
}

const NOTHING: Wanted = { columns: new Set(), rows: new Set(), devices: new Set() };

const MOST_ROWS = 200;
const LONGEST = 500; // characters of an id
const MOST_TEXT = 20_000; // characters of all ids, and of all uuids: the gateway takes messages of 64 KiB
const SETTLE = 30; // milliseconds in which a change of the view announces all its needs
const EVERY = 300;

export class Subscriptions {
  #send: (message: Outgoing) => boolean;
  #fresh: (row: string) => void;
  #needs = new Set<Need>();
  #timer: ReturnType<typeof setTimeout> | undefined;
  #sent: Wanted | null = null; // null: nothing on this socket
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
      const columns = new Set([...this.#whole].filter((one) => one !== 'aggregates'));
      this.#subscribe({ ...NOTHING, columns }, this.#whole.has('aggregates'));
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
      this.#subscribe(NOTHING, false);
      this.#now();
    }
    this.#opening = false;
  }

  /** Note that the gateway refused a message: a refused subscription is sent again without its ids, which it may not like. */
  refused(id: string): void {
    if (id !== this.#last || !(this.#sent?.rows.size || this.#sent?.devices.size)) return;
    const sent = this.#sent;
    this.#subscribe({ ...NOTHING, columns: sent.columns });
    this.#sent = sent; // as long as the same is wanted
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
      const wanted = this.#wanted();
      const names = ['columns', 'rows', 'devices'] as const;
      if (this.#sent && !names.every((name) => same<string>(wanted[name], this.#sent![name]))) this.#now();
    }, wait);
  }

  #now(): void {
    const wanted = this.#wanted();
    this.#when = Date.now();
    const before = this.#sent;
    for (const one of this.#whole) if (one !== 'aggregates' && !wanted.columns.has(one)) this.#whole.delete(one);
    for (const one of wanted.rows) if (!before?.rows.has(one)) this.#fresh(one);
    this.#subscribe(wanted);
  }

  #subscribe(wanted: Wanted, aggregates = true): void {
    const [columns, rows, devices] = [[...wanted.columns], [...wanted.rows], [...wanted.devices]];
    const sent = this.#send({ type: 'subscribe', id: this.#id(), aggregates, columns, rows, devices });
    this.#sent = sent ? wanted : null;
  }

  /** A hidden page needs aggregates alone. */
  #wanted(): Wanted {
    if (document.hidden) return NOTHING;
    const needs = [...this.#needs];
    return {
      columns: new Set(needs.flatMap((one) => one.columns ?? [])),
      rows: some(needs.flatMap((one) => one.rows ?? [])),
      devices: some(needs.flatMap((one) => one.devices ?? [])),
    };
  }

  #id(): string {
    this.#count += 1;
    this.#last = `subscription-${this.#count}`;
    return this.#last;
  }
}

/** As many of some ids as a subscription may have. */
function some(ids: readonly string[]): Set<string> {
  const taken = new Set<string>();
  let text = 0;
  for (const one of ids) {
    if (taken.size >= MOST_ROWS || one.length > LONGEST || text + one.length > MOST_TEXT || taken.has(one)) continue;
    text += one.length;
    taken.add(one);
  }
  return taken;
}

function same<T>(one: ReadonlySet<T>, other: ReadonlySet<T>): boolean {
  return one.size === other.size && [...one].every((item) => other.has(item));
}
