/** Whether the window is as narrow as a phone's: tables become cards then. Styles use the same width. */

import { MediaQuery } from 'svelte/reactivity';

export const phone = new MediaQuery('max-width: 640px');
