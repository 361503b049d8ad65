/** The position in the gateway's feed after which the page goes on when its socket was lost. */

import type { Incoming } from '../types';

export class Position {
  #feed: string | null = null;
  #at = 0;

  /** What the next socket says of it; null if there is none. */
  get text(): string | null {
    return this.#feed === null ? null : `${this.#feed}.${this.#at}`;
  }

  begin({ feed, at }: { feed?: string; at?: number }): void {
    this.#feed = feed !== undefined && at !== undefined ? feed : null;
    this.#at = at ?? 0;
  }

  /** Take the position of a message. Those of frames do not count: a message may still be missing before them. */
  take(message: Incoming): void {
    if ('at' in message && message.at !== undefined) this.#at = message.at;
  }

  end(): void {
    this.#feed = null;
  }
}
