/**
 * The store: what the page knows, who is signed in, and the actions of components. Nothing else of the page talks to the gateway.
 *
 * Its parts are in `store/`. Replicas are kept in plain maps and typed arrays and changed in place. A counter for each
 * subject tells components of changes, so that a frame with the values of ten thousand replicas costs a copy and no more.
 */

import { Gateway, type Link } from './api';
import type { CommandRun } from './commands';
import { isShown, shown } from './shown.svelte';
import { mergeGoodput } from './store/jobs';
import { Known } from './store/known.svelte';
import { newId, Orders } from './store/orders';
import { Requests } from './store/requests';
import { Subscriptions } from './store/subscriptions';
import type {
  CommandKind,
  EndedSession,
  Identity,
  Incoming,
  MetricPoint,
  PolicyAction,
  Target,
  WeaverEvent,
} from './types';

export type { Job } from './store/jobs';
export type { Replica } from './store/replicas';

export class Store extends Known {
  link = $state.raw<Link>({ state: 'connecting', since: Date.now(), reason: '' });
  identity = $state.raw<Identity | null>(null);
  /** Null while it is not known whether somebody is signed in. */
  signedIn = $state<boolean | null>(null);
  signInMessage = $state<string | null>(null);
  endedSessions = $state.raw<EndedSession[]>([]);

  readonly gateway: Gateway;
  protected readonly subscriptions: Subscriptions;
  readonly #requests: Requests;
  readonly #orders: Orders;

  constructor(base?: URL) {
    super();
    this.gateway = new Gateway(
      {
        message: (message) => this.handleWebSocketMessage(message),
        frame: (sections) => this.handleFrame(sections),
        since: () => this.position.text,
        unreadable: () => this.position.end(),
        link: (link) => this.#linked(link),
        signedIn: (identity) => {
          this.identity = identity;
          this.signedIn = true;
          this.signInMessage = null;
        },
        signedOut: (message) => this.#signedOut(message),
      },
      base,
    );
    this.#requests = new Requests(this.gateway);
    this.subscriptions = new Subscriptions(
      (message) => this.gateway.send(message),
      (row) => this.held.interrupt(row),
    );
    this.#orders = new Orders({
      replicas: this.held,
      log: this.log,
      send: (message) => this.gateway.send(message),
      by: () => this.identity?.name ?? '',
      clock: () => this.clock(),
      changed: () => this.changes.note('commands'),
    });
  }

  get canOperate(): boolean {
    return this.identity !== null && this.identity.scope !== 'view';
  }

  /** Why controls are disabled; null if they are not. */
  get whyDisabled(): string | null {
    if (!this.canOperate)
      return `Your token's scope is ${this.identity?.scope ?? 'unknown'}. Controls need a token of scope operate.`;
    if (this.link.state !== 'open') return 'The connection to the gateway is lost. Controls work again when it is back.';
    if (this.away !== null) return 'The weaver is away. Controls work again when it is back.';
    return null;
  }

  // What components do

  updateConfig(target: Target, params: Record<string, unknown>): string {
    return this.give('update_config', target, params);
  }

  pause(target: Target): string {
    return this.give('pause', target);
  }

  resume(target: Target): string {
    return this.give('resume', target);
  }

  stop(target: Target): string {
    return this.give('stop', target);
  }

  drain(target: Target): string {
    return this.give('drain', target);
  }

  /** Take out of use a device, or the devices of a group or replica. */
  deactivate(what: { device: string } | { group: string }): string {
    return this.give('deactivate_device', undefined, what);
  }

  reactivate(what: { device: string } | { group: string }): string {
    return this.give('reactivate', undefined, what);
  }

  /** Give a command and return its id, by which `command` finds what became of it. */
  give(kind: CommandKind, target: Target | undefined, params: Record<string, unknown> = {}): string {
    return this.#orders.give(kind, target, params);
  }

  setPolicy(group: string, action: PolicyAction): string {
    return this.#orders.setPolicy(group, action);
  }

  inject(fault: string, target: Target, params: Record<string, unknown>, duration: number | null): string {
    return this.#orders.inject(fault, target, params, duration);
  }

  removeFault(injection: string): string {
    return this.#orders.removeFault(injection);
  }

  /** Give the commands that take a command back; return their ids. */
  takeBack(run: CommandRun): string[] {
    return this.#orders.takeBack(run);
  }

  async endSession(name: string): Promise<void> {
    await this.#requests.endSession(name);
    await this.loadSessions();
  }

  async reportDeviceFailure(device: string, reason: string): Promise<void> {
    await this.#requests.reportDeviceFailure(device, reason, newId());
  }

  async loadSessions(): Promise<void> {
    const { sessions, ended } = await this.#requests.sessions();
    this.sessions = sessions.filter(isShown);
    this.endedSessions = ended.filter(isShown);
  }

  /** Load older commands and what became of them. */
  async loadCommands(): Promise<void> {
    for await (const events of this.#requests.commands()) this.takeOld(events);
  }

  /** Load whether the weaver stores what it is told, which is not pushed. */
  async loadStatus(): Promise<void> {
    this.status = await this.#requests.status();
  }

  /** Load the timelines and all faults of jobs, which are not pushed. */
  async loadGoodput(job?: string): Promise<void> {
    const records = await this.#requests.goodput(job);
    this.goodput = mergeGoodput(this.goodput, records, false);
  }

  async loadEvents(query: { kind?: string; replica?: string; limit?: number }): Promise<WeaverEvent[]> {
    return await this.#requests.events(query);
  }

  async loadMetrics(replica: string): Promise<string[]> {
    return await this.#requests.metrics(replica);
  }

  async loadHistory(replica: string, metric: string, since?: number, until?: number, points?: number): Promise<MetricPoint[]> {
    return await this.#requests.history(replica, metric, since, until, points);
  }

  async loadStacks(replica: string): Promise<string> {
    return await this.#requests.stacks(replica);
  }

  /** Show another user's training, as an admin may; null: one's own. Nothing of the one before is kept. */
  show(user: string | null): void {
    if (user === shown.user) return;
    shown.user = user;
    this.#orders.clear(); // they are not given again to another user's replicas
    this.endedSessions = [];
    this.clear();
    this.gateway.show(user);
  }

  /** Begin: sign in, connect, and let the time pass. */
  begin(): void {
    void this.gateway.begin();
    setInterval(() => this.tick(1.2), 500); // if no message lets it pass
    const hurry = (): void => {
      if (!document.hidden) this.gateway.hurry();
    };
    document.addEventListener('visibilitychange', () => {
      this.subscriptions.changed();
      hurry();
    });
    window.addEventListener('online', hurry);
  }

  // What the socket says

  protected override takeAnswer(message: Incoming): void {
    switch (message.type) {
      case 'accepted':
        this.log.accept(message.id, message.command, message.replicas ?? []);
        break;
      case 'acknowledgement':
        this.log.acknowledge(message, this.clock());
        break;
      case 'done':
        this.#orders.answered(message.id);
        this.log.done(message.id);
        break;
      case 'error':
        if (message.id === null) return;
        this.#orders.answered(message.id);
        this.subscriptions.refused(message.id);
        this.log.fail(message.id, message.message);
        break;
      default:
        return;
    }
    this.changes.note('commands');
  }

  protected override begun(anew: boolean): void {
    this.subscriptions.begun(anew);
    this.#orders.again();
  }

  #linked(link: Link): void {
    this.link = link;
    if (link.state === 'open') this.subscriptions.opened(this.position.text !== null);
    else this.subscriptions.closed();
  }

  #signedOut(message: string | null): void {
    this.identity = null;
    this.signedIn = false;
    this.signInMessage = message;
    this.endedSessions = [];
    this.#orders.clear();
    this.clear();
  }
}
