/** The followed log of a session: the last lines, as they come. */

import { GatewayError, type Gateway } from './api';
import type { LogLine } from './types';

const KEPT = 5000;
const ESCAPES = new RegExp('\u001b\\[[0-9;?]*[ -/]*[@-~]|\u001b\\][^\u0007]*\u0007', 'g'); // colours and titles of terminals

export interface LogFilter {
  mesh?: string;
  rank?: number;
  stream?: string;
  /** The id of a function of `job.run`. */
  run?: number;
}

export interface ShownLine extends LogLine {
  key: number;
}

export class LogFollower {
  lines = $state.raw<ShownLine[]>([]);
  state = $state<'loading' | 'following' | 'ended' | 'failed'>('loading');
  error = $state<string | null>(null);
  paused = $state(false);
  /** Lines that came while the view was paused. */
  held = $state(0);

  #gateway: Gateway;
  #stop = new AbortController();
  #buffer: ShownLine[] = [];
  #next = 0;
  #last = 0; // the time of the last line
  #scheduled = false;

  constructor(gateway: Gateway) {
    this.#gateway = gateway;
  }

  /** Follow a session's log from its last lines until `stop`; a broken connection is made again. */
  async follow(session: string, filter: LogFilter, tail: number): Promise<void> {
    const { signal } = this.#stop;
    for (let attempt = 0; !signal.aborted; attempt += 1) {
      const search = new URLSearchParams({ follow: 'true', tail: String(tail) });
      for (const [name, one] of Object.entries(filter)) if (one !== undefined && one !== '') search.set(name, String(one));
      try {
        const since = this.#last;
        for await (const lines of this.#gateway.lines(`sessions/${encodeURIComponent(session)}/logs?${search}`, signal)) {
          this.state = 'following';
          this.error = null;
          attempt = 0;
          // After a broken connection the tail has lines that came before.
          this.#take(since ? lines.filter((one) => one.time > since) : lines);
        }
        this.state = 'ended';
        this.#show();
        return;
      } catch (error) {
        if (signal.aborted) return;
        this.error = (error as Error).message;
        this.state = 'failed';
        if (error instanceof GatewayError && error.status >= 400 && error.status < 500) return;
        await new Promise((resolve) => setTimeout(resolve, Math.min(500 * 2 ** attempt, 8000)));
      }
    }
  }

  stop(): void {
    this.#stop.abort();
  }

  pause(paused: boolean): void {
    this.paused = paused;
    if (!paused) this.#show();
  }

  clear(): void {
    this.#buffer = [];
    this.#show();
  }

  #take(lines: LogLine[]): void {
    for (const line of lines) {
      const text = String(line.text ?? '').replace(ESCAPES, '');
      this.#buffer.push({ ...line, text, key: this.#next++ });
      this.#last = Math.max(this.#last, line.time);
    }
    if (this.#buffer.length > KEPT) this.#buffer.splice(0, this.#buffer.length - KEPT);
    if (this.paused) this.held += lines.length;
    else if (!this.#scheduled) {
      this.#scheduled = true;
      setTimeout(() => {
        this.#scheduled = false;
        if (!this.paused) this.#show();
      }, 100);
    }
  }

  #show(): void {
    this.held = 0;
    this.lines = this.#buffer.slice();
  }
}
