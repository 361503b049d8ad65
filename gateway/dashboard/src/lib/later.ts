/** The views that are no part of the page's first files. */

import type { Component } from 'svelte';

import type { View } from './route';

type Shown = Component<{ id: string; ids: readonly string[] }>;

const IDLE = 3000; // milliseconds after the start in which the first view has what the connection gives

const VIEWS: Record<string, () => Promise<{ default: unknown }>> = {
  compare: () => import('../views/Compare.svelte'),
  devices: () => import('../views/Devices.svelte'),
  steering: () => import('../views/Steering.svelte'),
  goodput: () => import('../views/Goodput.svelte'),
  chaos: () => import('../views/Chaos.svelte'),
  meshes: () => import('../views/Meshes.svelte'),
  sessions: () => import('../views/Sessions.svelte'),
  replicas: () => import('../views/Replicas.svelte'),
  replica: () => import('../views/Replica.svelte'),
};

const loaded = new Map<string, Shown>();

/** Return the name under which the component of a view is loaded, or of a single object in it. */
export function nameOfView(view: View, single: boolean): string {
  return single && view === 'replicas' ? 'replica' : view;
}

/** Return a component that was loaded before; null if it was not. */
export function loadedView(name: string): Shown | null {
  return loaded.get(name) ?? null;
}

export async function loadView(name: string): Promise<Shown> {
  const found = (await VIEWS[name]!()).default as Shown;
  loaded.set(name, found);
  return found;
}

/** Load all of them. One that cannot be loaded is asked for again when it is opened. */
export async function loadViews(): Promise<void> {
  await Promise.allSettled(Object.keys(VIEWS).map(loadView));
}

/** Load all of them once the page has begun, so that they are there even if the connection is lost later. */
export function loadViewsLater(): void {
  setTimeout(() => void loadViews(), IDLE);
}
