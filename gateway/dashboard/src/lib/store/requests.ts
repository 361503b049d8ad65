/** What is loaded by REST, because the socket does not push it. */

import type { Gateway } from '../api';
import type { EndedSession, GoodputRecord, MetricPoint, SessionInfo, WeaverEvent, WeaverStatus } from '../types';

const ABOUT_COMMANDS = ['command', 'policy', 'applied', 'refused', 'unanswered', 'fault_removed'];

export class Requests {
  #gateway: Gateway;

  constructor(gateway: Gateway) {
    this.#gateway = gateway;
  }

  async sessions(): Promise<{ sessions: SessionInfo[]; ended: EndedSession[] }> {
    return await this.#gateway.request('GET', 'sessions?ended=true');
  }

  async endSession(name: string): Promise<void> {
    await this.#gateway.request('DELETE', `sessions/${encodeURIComponent(name)}`);
  }

  async reportDeviceFailure(device: string, reason: string, report: string): Promise<void> {
    await this.#gateway.request('POST', `weaver/devices/${encodeURIComponent(device)}/failure`, { reason, report });
  }

  /** The events of older commands and of what became of them. */
  async *commands(): AsyncGenerator<WeaverEvent[]> {
    for (const kind of ABOUT_COMMANDS) yield await this.events({ kind, limit: 1000 });
  }

  async status(): Promise<WeaverStatus> {
    return await this.#gateway.request('GET', 'weaver/status');
  }

  async goodput(job?: string): Promise<GoodputRecord[]> {
    const search = job ? `?job=${encodeURIComponent(job)}` : '';
    return (await this.#gateway.request<{ jobs: GoodputRecord[] }>('GET', `weaver/goodput${search}`)).jobs;
  }

  async events(query: { kind?: string; replica?: string; limit?: number }): Promise<WeaverEvent[]> {
    const search = new URLSearchParams({ limit: String(query.limit ?? 200) });
    if (query.kind) search.set('kind', query.kind);
    if (query.replica) search.set('replica', query.replica);
    return (await this.#gateway.request<{ events: WeaverEvent[] }>('GET', `weaver/events?${search}`)).events;
  }

  async metrics(replica: string): Promise<string[]> {
    return (await this.#gateway.request<{ metrics: string[] }>('GET', `${at(replica)}/metrics`)).metrics;
  }

  async history(replica: string, metric: string, since?: number, until?: number, points = 500): Promise<MetricPoint[]> {
    const search = new URLSearchParams({ points: String(points) });
    if (since !== undefined) search.set('since', String(since));
    if (until !== undefined) search.set('until', String(until));
    const path = `${at(replica)}/metrics/${encodeURIComponent(metric)}?${search}`;
    return (await this.#gateway.request<{ points: MetricPoint[] }>('GET', path)).points;
  }

  async stacks(replica: string): Promise<string> {
    return await this.#gateway.text(`${at(replica)}/stacks`);
  }
}

function at(replica: string): string {
  return `weaver/replicas/${encodeURIComponent(replica)}`;
}
