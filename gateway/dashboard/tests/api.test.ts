import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import { Gateway, GatewayError, reconnectDelay, type Handlers, type Link } from '../src/lib/api';
import type { Section } from '../src/lib/store/frames';
import type { Identity, Incoming } from '../src/lib/types';
import { frame } from './objects';

class FakeSocket {
  static made: FakeSocket[] = [];
  readyState = 0;
  sent: string[] = [];
  onopen: (() => void) | null = null;
  onmessage: ((event: { data: string | ArrayBuffer }) => void) | null = null;
  binaryType = 'blob';
  onclose: ((event: { code: number; reason: string }) => void) | null = null;

  constructor(
    readonly url: URL,
    readonly protocols: string[],
  ) {
    FakeSocket.made.push(this);
  }

  send(text: string): void {
    this.sent.push(text);
  }

  close(): void {
    this.readyState = 3;
  }

  open(): void {
    this.readyState = 1;
    this.onopen?.();
  }

  say(message: unknown): void {
    this.onmessage?.({ data: JSON.stringify(message) });
  }
}

const ME = { user: 'ada', name: 'ada', scope: 'operate', expires: null };

let links: Link[];
let messages: Incoming[];
let identities: Identity[];
let outs: (string | null)[];
let frames: (readonly Section[])[];
let since: string | null;
let unreadable: number;
let gateway: Gateway;
let answers: (url: URL, init: RequestInit) => Response | Promise<Response>;

const json = (body: unknown, status = 200): Response => new Response(JSON.stringify(body), { status });
const refusal = (status: number, code: string, message: string): Response => json({ error: { code, message } }, status);
const last = (): FakeSocket => FakeSocket.made.at(-1)!;

beforeEach(() => {
  vi.useFakeTimers();
  FakeSocket.made = [];
  [links, messages, identities, outs, frames] = [[], [], [], [], []];
  [since, unreadable] = [null, 0];
  answers = () => json(ME);
  vi.stubGlobal('WebSocket', FakeSocket);
  vi.stubGlobal('fetch', vi.fn((url: URL, init: RequestInit) => Promise.resolve(answers(url, init))));
  const handlers: Handlers = {
    message: (one) => messages.push(one),
    frame: (sections) => frames.push(sections),
    since: () => since,
    unreadable: () => (unreadable += 1),
    link: (one) => links.push(one),
    signedIn: (one) => identities.push(one),
    signedOut: (one) => outs.push(one),
  };
  gateway = new Gateway(handlers, new URL('https://loom.test/team/loom/'));
});

afterEach(() => {
  gateway.disconnect();
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

async function pass(milliseconds: number): Promise<void> {
  await vi.advanceTimersByTimeAsync(milliseconds);
}

describe('the socket', () => {
  it('is at the prefix of the page, with TLS where the page has it', () => {
    gateway.connect();
    expect(String(last().url)).toBe('wss://loom.test/team/loom/ws/v1/weaver');
    expect(last().protocols).toEqual(['loom.page']);
  });

  it('shows a key that is kept in memory as a subprotocol', async () => {
    answers = () => json({ ...ME, key: 'abc' });
    await gateway.signIn({ token: 't' });
    expect(last().protocols).toEqual(['loom.page', 'loom.key.abc']);
    answers = (_, init) => json(new Headers(init.headers).get('authorization'));
    expect(await gateway.request('GET', 'status')).toBe('Bearer abc');
  });

  it('shows a lost connection at once and connects again', async () => {
    gateway.connect();
    last().open();
    last().onclose!({ code: 1006, reason: '' });
    expect(links.at(-1)!.state).toBe('lost');
    await pass(700);
    expect(FakeSocket.made).toHaveLength(2);
    last().open();
    expect(links.at(-1)!.state).toBe('open');
  });

  it('waits longer after each failure, up to ten seconds', () => {
    expect([0, 1, 2, 10].map((one) => reconnectDelay(one, 0.5))).toEqual([500, 1000, 2000, 10_000]);
    expect(reconnectDelay(0, 0)).toBe(400);
  });

  it('goes on trying while the gateway is away', async () => {
    gateway.connect();
    last().open();
    answers = () => Promise.reject(new TypeError('refused'));
    last().onclose!({ code: 1006, reason: '' });
    await pass(60_000);
    expect(FakeSocket.made).toHaveLength(1);
    expect(outs).toEqual([]);
    answers = () => json(ME);
    await pass(13_000);
    expect(FakeSocket.made).toHaveLength(2);
  });

  it('ends with the sign-in form when the token was revoked', async () => {
    gateway.connect();
    last().open();
    answers = () => refusal(401, 'token_revoked', 'the token was revoked');
    last().onclose!({ code: 4000, reason: 'token_revoked' });
    await pass(1000);
    expect(outs).toEqual(['the token was revoked']);
    await pass(60_000);
    expect(FakeSocket.made).toHaveLength(1);
  });

  it('counts as lost when pings are not answered any more', async () => {
    gateway.connect();
    last().open();
    await pass(5000);
    expect(last().sent.map((one) => JSON.parse(one).type)).toEqual(['ping']);
    last().say({ type: 'pong', id: '1' });
    await pass(5000);
    expect(links.at(-1)!.state).toBe('open');
    await pass(5000);
    expect(links.at(-1)!.state).toBe('lost');
  });

  it('stays with a gateway that knows no pings', async () => {
    gateway.connect();
    last().open();
    await pass(60_000);
    expect(links.at(-1)!.state).toBe('open');
  });

  it('passes messages on, and sends only when it is open', () => {
    gateway.connect();
    expect(gateway.send({ type: 'ping', id: '1' })).toBe(false);
    last().open();
    last().say({ type: 'away', reason: 'x' });
    expect(messages).toEqual([{ type: 'away', reason: 'x' }]);
    expect(gateway.send({ type: 'ping', id: '1' })).toBe(true);
  });
});

describe('binary frames', () => {
  it('are passed on as sections', () => {
    gateway.connect();
    last().open();
    expect(last().binaryType).toBe('arraybuffer');
    last().onmessage!({ data: frame({ column: 'step', values: [4, 5] }) });
    expect(frames.map((one) => one.map(({ column, values }) => [column, ...values]))).toEqual([[['step', 4, 5]]]);
  });

  it.each([
    ['a cut frame', frame({ column: 'step', values: [4, 5] }).slice(0, 20)],
    ['garbage', new Uint8Array([9, 9, 9, 9, 9, 9, 9, 9]).buffer],
    ['no JSON', '{"type": "del'],
    ['no message', 'null'],
  ])('and texts: %s closes the socket, and the page connects again', async (_, data) => {
    gateway.connect();
    last().open();
    const before = last();
    before.onmessage!({ data });
    expect(before.readyState).toBe(3);
    expect(unreadable).toBe(1);
    expect(links.at(-1)!.state).toBe('lost');
    expect(links.at(-1)!.reason).toContain('cannot read');
    expect([messages, frames]).toEqual([[], []]);
    await pass(700);
    expect(FakeSocket.made).toHaveLength(2);
  });

  it('that make no sense again and again are asked for less and less', async () => {
    gateway.connect();
    for (let socket = 1; socket <= 5; socket += 1) {
      last().open();
      last().say({ type: 'subscribed', id: '1' });
      last().onmessage!({ data: new ArrayBuffer(1) });
      await pass(500 * 2 ** (socket - 1) * 1.2 + 100);
      expect(FakeSocket.made).toHaveLength(socket + 1);
    }
    last().open();
    last().onmessage!({ data: new ArrayBuffer(1) });
    await pass(7000);
    expect(FakeSocket.made).toHaveLength(6);
  });
});

describe('a feed', () => {
  it('goes on after the last position', () => {
    since = 'epoch.12';
    gateway.connect();
    expect(String(last().url)).toBe('wss://loom.test/team/loom/ws/v1/weaver?since=epoch.12');
  });
});

describe('REST', () => {
  it('marks what is not GET', async () => {
    let seen = new Headers();
    answers = (_, init) => {
      seen = new Headers(init.headers);
      return json({});
    };
    await gateway.request('POST', 'x', { a: 1 });
    expect(seen.get('x-loom-page')).toBe('1');
    await gateway.request('GET', 'x');
    expect(seen.get('x-loom-page')).toBeNull();
  });

  it('raises the error of the gateway', async () => {
    answers = () => refusal(404, 'not_found', 'no such replica');
    await expect(gateway.request('GET', 'x')).rejects.toMatchObject({ status: 404, code: 'not_found', message: 'no such replica' });
    answers = () => new Response('<html>', { status: 502 });
    await expect(gateway.request('GET', 'x')).rejects.toBeInstanceOf(GatewayError);
  });

  it('shows the form after a 401', async () => {
    answers = () => refusal(401, 'authentication', 'the token has expired');
    await expect(gateway.request('GET', 'x')).rejects.toThrow('expired');
    expect(outs).toEqual(['the token has expired']);
  });

  it('reads a stream of lines, also when one comes in pieces', async () => {
    const pieces = ['{"text":"a"}\n{"te', 'xt":"b"}\n\n', '{"text":"c"}\n'];
    answers = () => {
      const body = new ReadableStream({
        start(controller) {
          for (const one of pieces) controller.enqueue(new TextEncoder().encode(one));
          controller.close();
        },
      });
      return new Response(body);
    };
    const texts: string[] = [];
    for await (const lines of gateway.lines('logs', new AbortController().signal)) texts.push(...lines.map((one) => one.text));
    expect(texts).toEqual(['a', 'b', 'c']);
  });
});

describe('signing in', () => {
  it('takes the code out of the address and uses it once', async () => {
    history.replaceState(null, '', '#code=s3cret');
    let body: unknown;
    answers = (_, init) => {
      body = JSON.parse(String(init.body));
      return json({ ...ME, key: null });
    };
    await gateway.begin();
    expect(body).toEqual({ code: 's3cret', path: '/team/loom/' });
    expect(location.hash).toBe('');
    expect(identities).toEqual([ME]);
  });

  it('goes on with a cookie, or shows the form', async () => {
    await gateway.begin();
    expect(identities).toEqual([ME]);
    gateway.disconnect();
    answers = () => refusal(401, 'authentication', 'no token');
    await gateway.begin();
    expect(outs).toEqual([null]);
  });

  it('waits for a gateway that does not answer yet', async () => {
    answers = () => Promise.reject(new TypeError('refused'));
    await gateway.begin();
    expect(links.at(-1)!.state).toBe('lost');
    answers = () => json(ME);
    await pass(2000);
    expect(identities).toEqual([ME]);
  });
});
