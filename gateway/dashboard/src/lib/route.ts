/** Addresses of views: `#/VIEW/PART/PART?name=value`. */

import { shown } from './shown.svelte';

export const VIEWS = ['overview', 'runs', 'compare', 'replicas', 'devices', 'steering', 'goodput', 'chaos', 'sessions', 'meshes'] as const;

export type View = (typeof VIEWS)[number];

export const TITLES: Record<View, string> = {
  overview: 'Overview',
  runs: 'Runs',
  compare: 'Compare',
  replicas: 'Replicas',
  devices: 'Devices',
  steering: 'Steering',
  goodput: 'Goodput',
  chaos: 'Chaos',
  sessions: 'Sessions',
  meshes: 'Meshes',
};

export interface Route {
  view: View;
  /** What follows the view: the name of a job or of a session, or the ids of runs or of a replica. */
  parts: string[];
  query: Record<string, string>;
}

export function parseRoute(hash: string): Route {
  const [path = '', search = ''] = split(hash.replace(/^#\/?/, ''), '?');
  const [view = '', ...parts] = path.split('/').filter(Boolean).map(decode);
  const known = (VIEWS as readonly string[]).includes(view) ? (view as View) : null;
  return {
    view: known ?? 'overview',
    parts: known ? parts : [],
    query: known ? Object.fromEntries(new URLSearchParams(search)) : {},
  };
}

export function formatRoute(view: View, parts: string[] = [], query: Record<string, string | null | undefined> = {}): string {
  const path = [view, ...parts].map(encodeURIComponent).join('/');
  const given = Object.entries({ user: shown.user, ...query }).filter((one): one is [string, string] => Boolean(one[1]));
  const search = new URLSearchParams(given).toString();
  return `#/${path}${search ? `?${search}` : ''}`;
}

/** Return the one-time code of an address such as `#code=…`, if there is one. */
export function codeIn(hash: string): string | null {
  const match = /^#\/?code=([^&/?#]+)$/.exec(hash);
  return match ? decode(match[1]!) : null;
}

function split(text: string, at: string): [string, string] {
  const found = text.indexOf(at);
  return found < 0 ? [text, ''] : [text.slice(0, found), text.slice(found + 1)];
}

function decode(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
