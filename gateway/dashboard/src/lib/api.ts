/** The service: signing in, REST, and the socket, which reconnects by itself. It holds no state of the training. */

import { codeIn } from './route';
import { readFrame, type Section } from './store/frames';
import type { Identity, Incoming, LogLine, Outgoing } from './types';

const REFUSED = 4000; // the close code with which the gateway refuses a socket; its reason is an error's code
const PING_EVERY = 5000;
const SILENT_AFTER = 5000; // milliseconds from a ping without any answer until the connection counts as lost
const FIRST_DELAY = 500;
const LONGEST_DELAY = 10_000;
const CLEAN_AFTER = 60_000; // milliseconds without an unreadable message until the next one counts as the first

export type LinkState = 'connecting' | 'open' | 'lost' | 'closed';

export interface Link {
  state: LinkState;
  /** When the state began, in milliseconds since the epoch. */
  since: number;
  reason: string;
}

export interface Handlers {
  message(message: Incoming): void;
  frame(sections: readonly Section[]): void;
  /** The position after which the next socket goes on; null if it begins anew. */
  since(): string | null;
  /** What came could not be read: what the page knows may be incomplete. */
  unreadable(): void;
  link(link: Link): void;
  signedIn(identity: Identity): void;
  /** The sign-in form is needed; `message` says why, if there is a reason. */
  signedOut(message: string | null): void;
}

export class GatewayError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
  ) {
    super(message);
  }
}

/** Return the milliseconds before an attempt to reconnect; `random` is from 0 to 1. */
export function reconnectDelay(attempt: number, random = Math.random()): number {
  return Math.min(FIRST_DELAY * 2 ** attempt, LONGEST_DELAY) * (0.8 + 0.4 * random);
}

export class Gateway {
  readonly base: URL;
  #handlers: Handlers;
  #key: string | null = null; // kept in memory alone
  #socket: WebSocket | null = null;
  #wanted = false;
  #attempt = 0;
  #retry: ReturnType<typeof setTimeout> | undefined;
  #pings: ReturnType<typeof setInterval> | undefined;
  #pinged = 0;
  #heard = 0;
  #answersPings = false;
  #unreadable = 0; // messages in sequence, each on a socket of its own
  #wasUnreadable = 0;
  #user: string | null = null;

  constructor(handlers: Handlers, base = new URL('.', location.href)) {
    this.#handlers = handlers;
    this.base = base;
    this.base.hash = this.base.search = '';
  }

  /** Sign in with the code of the address or of the notebook around the page, or with the cookie, and connect. */
  async begin(): Promise<void> {
    const code = codeIn(location.hash);
    if (code) {
      history.replaceState(null, '', `${location.pathname}${location.search}`);
      try {
        return await this.signIn({ code });
      } catch (error) {
        return this.#handlers.signedOut((error as Error).message);
      }
    }
    if (window.parent !== window) {
      window.addEventListener('message', (event) => void this.#takeCode(event));
      window.parent.postMessage({ loom: 'ready' }, '*');
    }
    await this.#resume();
  }

  async #resume(): Promise<void> {
    try {
      const identity = await this.request<Identity>('GET', 'page/me', undefined, { quiet: true });
      this.#handlers.signedIn(identity);
      this.connect();
    } catch (error) {
      if (this.#wanted) return; // a code came meanwhile
      if (error instanceof GatewayError && error.status === 401) this.#handlers.signedOut(null);
      else {
        this.#setLink('lost', (error as Error).message);
        this.#retry = setTimeout(() => void this.#resume(), reconnectDelay(this.#attempt++));
      }
    }
  }

  async #takeCode(event: MessageEvent): Promise<void> {
    const code: unknown = event.source === window.parent ? event.data?.loom_code : null;
    if (typeof code !== 'string') return;
    try {
      await this.signIn({ code });
    } catch (error) {
      this.#handlers.signedOut((error as Error).message);
    }
  }

  async signIn(given: { token: string } | { code: string }): Promise<void> {
    const body = { ...given, path: this.base.pathname };
    const answer = await this.request<Identity & { key: string | null }>('POST', 'page/sign-in', body, { quiet: true });
    const { key, ...identity } = answer;
    this.#key = key ?? null;
    this.#handlers.signedIn(identity);
    this.connect();
  }

  async signOut(): Promise<void> {
    this.disconnect();
    let message: string | null = null;
    try {
      await this.request('POST', 'page/sign-out', {}, { quiet: true });
    } catch (error) {
      // A 401 means that the sign-in was over already.
      if (!(error instanceof GatewayError && error.status === 401))
        message = `The sign-in may still hold in this browser: ${(error as Error).message}`;
    }
    this.#key = null;
    this.#handlers.signedOut(message);
  }

  /** Show another user's training, as an admin may; null: one's own. The socket is connected again. */
  show(user: string | null): void {
    if (user === this.#user) return;
    this.#user = user;
    if (this.#wanted) this.connect();
  }

  /** Send a REST request and return its JSON. With `quiet`, a 401 is only raised and shows no form. */
  async request<T>(method: string, path: string, body?: unknown, { quiet = false } = {}): Promise<T> {
    const answer = await this.#fetch(method, path, body, quiet);
    return (answer.status === 204 ? null : await answer.json()) as T;
  }

  async text(path: string): Promise<string> {
    return await (await this.#fetch('GET', path)).text();
  }

  /** Follow a stream of JSON lines until it ends or the signal aborts it. Empty lines are signs of life. */
  async *lines(path: string, signal: AbortSignal): AsyncGenerator<LogLine[]> {
    const answer = await this.#fetch('GET', path, undefined, false, signal);
    const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
    let rest = '';
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split('\n');
      rest = parts.pop()!;
      const lines = parts.filter((one) => one.trim()).map((one) => JSON.parse(one) as LogLine);
      if (lines.length) yield lines;
    }
  }

  async #fetch(method: string, path: string, body?: unknown, quiet = false, signal?: AbortSignal): Promise<Response> {
    const user = this.#user;
    const headers: Record<string, string> = { Accept: 'application/json, text/plain' };
    if (method !== 'GET') headers['X-Loom-Page'] = '1';
    if (body !== undefined) headers['Content-Type'] = 'application/json';
    if (this.#key !== null) headers['Authorization'] = `Bearer ${this.#key}`;
    let answer: Response;
    try {
      answer = await fetch(new URL(`api/v1/${ofUser(path, user)}`, this.base), {
        method,
        headers,
        body: body === undefined ? null : JSON.stringify(body),
        credentials: 'same-origin',
        signal: signal ?? null,
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new GatewayError(0, 'unreachable', 'The gateway does not answer.');
    }
    if (user !== this.#user) throw new GatewayError(0, 'other_user', 'Another user was chosen meanwhile.');
    if (answer.ok) return answer;
    const error = await errorOf(answer);
    if (answer.status === 401 && !quiet) this.#end(error.message);
    throw error;
  }

  /** Connect the socket, and reconnect it whenever it is lost. */
  connect(): void {
    this.#wanted = true;
    this.#attempt = 0;
    this.#open();
  }

  disconnect(): void {
    this.#wanted = false;
    clearTimeout(this.#retry);
    this.#drop();
    this.#setLink('closed', '');
  }

  /** Try again at once, if the connection is lost. */
  hurry(): void {
    if (!this.#wanted || this.#socket) return;
    clearTimeout(this.#retry);
    void this.#reconnect();
  }

  /** Send a message; return whether there was a connection to send it on. */
  send(message: Outgoing): boolean {
    if (this.#socket?.readyState !== 1) return false;
    this.#socket.send(JSON.stringify(message));
    return true;
  }

  #open(): void {
    this.#drop();
    this.#setLink('connecting', '');
    const address = new URL(ofUser('ws/v1/weaver', this.#user), this.base);
    address.protocol = address.protocol === 'https:' ? 'wss:' : 'ws:';
    const since = this.#handlers.since();
    if (since !== null) address.searchParams.set('since', since);
    const protocols = this.#key === null ? ['loom.page'] : ['loom.page', `loom.key.${this.#key}`];
    const socket = new WebSocket(address, protocols);
    socket.binaryType = 'arraybuffer';
    this.#socket = socket;
    this.#answersPings = false;
    socket.onopen = () => {
      this.#heard = this.#pinged = Date.now();
      this.#pings = setInterval(() => this.#ping(), PING_EVERY);
      this.#setLink('open', '');
    };
    socket.onmessage = (event: MessageEvent<string | ArrayBuffer>) => {
      this.#heard = Date.now();
      let read: Incoming | Section[];
      try {
        read = typeof event.data === 'string' ? readMessage(event.data) : readFrame(event.data);
      } catch (error) {
        return this.#cannotRead(error as Error);
      }
      if (Array.isArray(read)) this.#handlers.frame(read);
      else if (read.type === 'pong') this.#answersPings = true;
      else this.#handlers.message(read);
      this.#attempt = 0;
    };
    socket.onclose = (event) => this.#lost(event.code === REFUSED ? event.reason : '');
  }

  /** Connect anew, and later each time, should the next socket bring the same. */
  #cannotRead(error: Error): void {
    if (Date.now() - this.#wasUnreadable > CLEAN_AFTER) this.#unreadable = 0;
    this.#wasUnreadable = Date.now();
    this.#attempt = this.#unreadable;
    this.#unreadable += 1;
    this.#handlers.unreadable();
    this.#lost(`The gateway sent what this page cannot read. ${error.message}`);
  }

  #ping(): void {
    if (this.#answersPings && this.#heard < this.#pinged && Date.now() - this.#pinged >= SILENT_AFTER)
      return this.#lost('the gateway does not answer');
    this.#pinged = Date.now();
    this.send({ type: 'ping', id: String(this.#pinged) });
  }

  #lost(reason: string): void {
    this.#drop();
    if (!this.#wanted) return;
    this.#setLink('lost', reason);
    this.#schedule();
  }

  #schedule(): void {
    clearTimeout(this.#retry);
    this.#retry = setTimeout(() => void this.#reconnect(), reconnectDelay(this.#attempt++));
  }

  /** Ask first whether the sign-in still holds: a browser does not say why a socket was refused. */
  async #reconnect(): Promise<void> {
    try {
      this.#handlers.signedIn(await this.request<Identity>('GET', 'page/me'));
    } catch (error) {
      if (!(error instanceof GatewayError && error.status === 401) && this.#wanted) this.#schedule();
      return;
    }
    if (this.#wanted && !this.#socket) this.#open();
  }

  #drop(): void {
    clearInterval(this.#pings);
    const socket = this.#socket;
    this.#socket = null;
    if (!socket) return;
    socket.onopen = socket.onmessage = socket.onclose = null;
    socket.close();
  }

  #end(message: string): void {
    this.disconnect();
    this.#key = null;
    this.#handlers.signedOut(message);
  }

  #setLink(state: LinkState, reason: string): void {
    this.#handlers.link({ state, reason, since: Date.now() });
  }
}

function readMessage(text: string): Incoming {
  const read: unknown = JSON.parse(text);
  if (typeof (read as Incoming | null)?.type !== 'string') throw new TypeError('It has no type.');
  return read as Incoming;
}

/** Return a path with the user whose training it is about, if it is about one's training. */
function ofUser(path: string, user: string | null): string {
  if (user === null || !/^((ws\/v1\/)?weaver|runs)\b/.test(path)) return path;
  return `${path}${path.includes('?') ? '&' : '?'}user=${encodeURIComponent(user)}`;
}

async function errorOf(answer: Response): Promise<GatewayError> {
  try {
    const { error } = (await answer.json()) as { error: { code: string; message: string } };
    return new GatewayError(answer.status, error.code, error.message);
  } catch {
    return new GatewayError(answer.status, 'error', `The gateway answered with status ${answer.status}.`);
  }
}
