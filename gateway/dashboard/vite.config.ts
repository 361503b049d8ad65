import { readdirSync } from 'node:fs';

import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig } from 'vitest/config';

// Elements have the class of their component by the hundred: its number among all is shorter than a hash, and packs better.
const components = readdirSync(new URL('src', import.meta.url), { recursive: true, encoding: 'utf-8' }).filter((one) => one.endsWith('.svelte')).sort();
const classOf = (file: string): string => `s${components.findIndex((one) => file.endsWith(`src/${one}`)).toString(36)}`;

export default defineConfig({
  base: './', // the page works under any prefix
  plugins: [svelte({ compilerOptions: { css: 'external', cssHash: ({ filename }) => classOf(filename) } })],
  build: {
    outDir: '../loom_gateway/dashboard/static',
    emptyOutDir: true,
    target: 'es2022',
    assetsInlineLimit: 0, // the page's content policy allows data: for images alone
    modulePreload: { polyfill: false },
    cssCodeSplit: false,
  },
  resolve: process.env['VITEST'] ? { conditions: ['browser'] } : {},
  test: { environment: 'jsdom', include: ['tests/**/*.test.ts'], testTimeout: 30_000 },
});
