/** The newest events, in the order of their ids. */

import type { WeaverEvent } from '../types';

const KEPT = 2000;
const SPARE = 500; // events above that until the oldest are dropped at once

export class EventLog {
  #events: WeaverEvent[] = []; // the oldest first

  list(): WeaverEvent[] {
    return this.#events.slice(-KEPT);
  }

  clear(): void {
    this.#events = [];
  }

  keep(event: WeaverEvent): void {
    const events = this.#events;
    const last = events.at(-1);
    if (!last || event.id > last.id) events.push(event);
    else {
      let low = 0;
      let high = events.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (events[middle]!.id < event.id) low = middle + 1;
        else high = middle;
      }
      // An event whose id has come before is that event with an addition.
      events.splice(low, events[low]?.id === event.id ? 1 : 0, event);
    }
    if (events.length > KEPT + SPARE) events.splice(0, events.length - KEPT);
  }
}
