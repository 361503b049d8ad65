/** The current address as reactive state. */

import { formatRoute, parseRoute, type Route, type View } from './route';

class Router {
  route = $state.raw<Route>(parseRoute(location.hash));

  constructor() {
    window.addEventListener('hashchange', () => this.#read());
    window.addEventListener('popstate', () => this.#read());
  }

  go(view: View, parts: string[] = [], query: Record<string, string | null | undefined> = {}): void {
    location.hash = formatRoute(view, parts, query);
  }

  /** Change parts of the query without a new entry in the browser's history. */
  set(changes: Record<string, string | null>): void {
    const { view, parts, query } = this.route;
    const hash = formatRoute(view, parts, { ...query, ...changes });
    this.route = parseRoute(hash);
    try {
      history.replaceState(null, '', hash);
    } catch {
      // Browsers refuse more than some changes a second; the view has the change all the same.
    }
  }

  #read(): void {
    this.route = parseRoute(location.hash);
  }
}

export const router = new Router();
