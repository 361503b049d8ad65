import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig } from 'vitest/config';

export default defineConfig({
  base: './', // the page works under any prefix
  plugins: [svelte({ compilerOptions: { css: 'external', cssHash: ({ hash, filename }) => `s${hash(filename)}` } })], // short: elements have it by the hundred
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
