/** What a session's driver tells of its meshes and runs, and how the page asks for it. */

import { GatewayError, type Gateway } from './api';

export const ELEMENT_STATES = ['failed', 'starting', 'alive', 'stopped'] as const;

export type ElementState = (typeof ELEMENT_STATES)[number];

export interface Elements {
  counts: Partial<Record<ElementState, number>>;
  /** The state of each rank; empty for a large mesh. */
  states: ElementState[];
  failures: { rank: number; reason: string }[];
}

export interface EndpointInfo {
  name: string;
  calls: number;
  failures: number;
  in_flight: number;
  calls_per_second: number;
  /** Seconds; null if no call was answered lately. */
  p50: number | null;
  p99: number | null;
}

export interface MeshInfo {
  id: number;
  name: string;
  extent: Record<string, number>;
  elements: Elements;
  stopped: boolean;
}

export interface ActorMesh extends MeshInfo {
  class_name: string;
  endpoints: EndpointInfo[];
}

export interface ProcMesh extends MeshInfo {
  actors: ActorMesh[];
}

export interface HostMesh extends MeshInfo {
  procs: ProcMesh[];
}

export interface SessionMeshes {
  hosts: HostMesh;
  left_out: number;
}

export interface RunInfo {
  id: number;
  name: string;
  state: 'running' | 'done' | 'failed' | 'cancelled';
  started: number;
  finished: number | null;
  /** The runs of trainings that the function is of. */
  trains: { id: string; name: string }[];
}

export type MeshKind = 'hosts' | 'processes' | 'actors';

/** A visible row of the tree. */
export interface MeshRow {
  mesh: MeshInfo;
  kind: MeshKind;
  level: number;
  /** The id of the mesh that this one is on; null for the hosts. */
  parent: number | null;
  place: number;
  siblings: number;
  /** Null for a mesh with nothing on it. */
  open: boolean | null;
}

/** Return the rows of a tree in order. A mesh is open unless it was stopped; `toggled` has those that are otherwise. */
export function visibleRows(tree: SessionMeshes, toggled: ReadonlySet<number>): MeshRow[] {
  const rows: MeshRow[] = [];
  const add = (meshes: MeshInfo[], level: number, parent: number | null): void =>
    meshes.forEach((mesh, at) => {
      const below = childrenOf(mesh);
      const open = below.length ? mesh.stopped === toggled.has(mesh.id) : null;
      rows.push({ mesh, kind: kindOf(mesh), level, parent, place: at + 1, siblings: meshes.length, open });
      if (open) add(below, level + 1, mesh.id);
    });
  add([tree.hosts], 1, null);
  return rows;
}

export function kindOf(mesh: MeshInfo): MeshKind {
  return 'procs' in mesh ? 'hosts' : 'actors' in mesh ? 'processes' : 'actors';
}

export function childrenOf(mesh: MeshInfo): MeshInfo[] {
  return (mesh as HostMesh).procs ?? (mesh as ProcMesh).actors ?? [];
}

/** Return a mesh by its id; null if the tree has none. */
export function findMesh(tree: SessionMeshes, id: number): MeshInfo | null {
  return allIn(tree.hosts).find((mesh) => mesh.id === id) ?? null;
}

/** Return the called endpoints of a mesh and of what is on it, the busiest first. */
export function endpointsIn(mesh: MeshInfo): { mesh: ActorMesh; endpoint: EndpointInfo }[] {
  const found = allIn(mesh)
    .filter((one): one is ActorMesh => 'endpoints' in one)
    .flatMap((one) => one.endpoints.map((endpoint) => ({ mesh: one, endpoint })));
  return found.sort((one, other) => other.endpoint.calls_per_second - one.endpoint.calls_per_second || other.endpoint.calls - one.endpoint.calls);
}

function allIn(mesh: MeshInfo): MeshInfo[] {
  return [mesh, ...childrenOf(mesh).flatMap(allIn)];
}

/** Return a mesh's dimensions as text, such as `hosts 2 × gpus 8`. */
export function extentText(extent: Record<string, number>): string {
  return Object.entries(extent)
    .map(([name, size]) => `${name} ${size}`)
    .join(' × ');
}

/** An answer of the gateway that is asked for again and again while the page is seen, until `stop`. */
export class Polled<T> {
  value = $state.raw<T | null>(null);
  /** Why the last request failed; null if it was answered. */
  error = $state<string | null>(null);
  /** Whether it will not be asked again, because what was asked about is gone. */
  over = $state(false);

  #timer: ReturnType<typeof setTimeout> | undefined;
  #stopped = false;
  #asking = false;

  constructor(
    private gateway: Pick<Gateway, 'request'>,
    private path: string,
    private every = 2000,
  ) {
    document.addEventListener('visibilitychange', this.#seen);
    void this.#ask();
  }

  stop(): void {
    this.#stopped = true;
    clearTimeout(this.#timer);
    document.removeEventListener('visibilitychange', this.#seen);
  }

  #seen = (): void => {
    if (document.hidden) return;
    clearTimeout(this.#timer);
    void this.#ask();
  };

  async #ask(): Promise<void> {
    if (this.#asking || this.#stopped || document.hidden) return;
    this.#asking = true;
    try {
      const value = await this.gateway.request<T>('GET', this.path);
      if (this.#stopped) return;
      this.value = value;
      this.error = null;
    } catch (error) {
      if (this.#stopped) return;
      this.error = (error as Error).message;
      if (error instanceof GatewayError && (error.status === 404 || error.status === 410)) {
        this.over = true;
        this.stop();
      }
    } finally {
      this.#asking = false;
    }
    if (!this.#stopped) this.#timer = setTimeout(() => void this.#ask(), this.every);
  }
}
