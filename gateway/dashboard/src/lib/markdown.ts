/**
 * Notes in Markdown as a tree that components draw: paragraphs, headings, lists, code, bold, italics and links.
 *
 * There is no HTML in it: what looks like a tag is text. A link leads to http or https, or is text.
 */

export type Span =
  | { kind: 'text'; text: string }
  | { kind: 'code'; text: string }
  | { kind: 'bold'; spans: Span[] }
  | { kind: 'italic'; spans: Span[] }
  | { kind: 'link'; address: string; spans: Span[] };

export type Block =
  | { kind: 'paragraph'; spans: Span[] }
  | { kind: 'heading'; spans: Span[] }
  | { kind: 'list'; ordered: boolean; items: Span[][] }
  | { kind: 'code'; text: string };

const ITEM = /^\s*(?:[-*+]|(\d+)[.)])\s+(.*)$/;
const MOST_DEPTH = 4;

export function parseMarkdown(text: string): Block[] {
  const blocks: Block[] = [];
  const lines = text.replace(/\r\n?/g, '\n').split('\n');
  let words: string[] = [];
  const close = (): void => {
    if (words.length) blocks.push({ kind: 'paragraph', spans: parseSpans(words.join('\n')) });
    words = [];
  };
  for (let at = 0; at < lines.length; at += 1) {
    const line = lines[at]!;
    if (/^\s*```/.test(line)) {
      close();
      const end = lines.findIndex((one, place) => place > at && /^\s*```\s*$/.test(one));
      const until = end < 0 ? lines.length : end;
      blocks.push({ kind: 'code', text: lines.slice(at + 1, until).join('\n') });
      at = until;
      continue;
    }
    const heading = /^#{1,6}\s+(.*)$/.exec(line);
    const item = ITEM.exec(line);
    if (!line.trim()) close();
    else if (heading) {
      close();
      blocks.push({ kind: 'heading', spans: parseSpans(heading[1]!) });
    } else if (item) {
      close();
      const ordered = item[1] !== undefined;
      const last = blocks.at(-1);
      const goesOn = last?.kind === 'list' && last.ordered === ordered && ITEM.test(lines[at - 1] ?? '');
      if (goesOn) last.items.push(parseSpans(item[2]!));
      else blocks.push({ kind: 'list', ordered, items: [parseSpans(item[2]!)] });
    } else words.push(line);
  }
  close();
  return blocks;
}

const SPAN =
  /`(?<code>[^`\n]+)`|\[(?<label>[^\][]+)\]\((?<link>https?:\/\/[^\s()<>]+)\)|(?<address>https?:\/\/[^\s()<>"'`*]*[^\s()<>"'`*.,;:!?])|\*\*(?=\S)(?<bold>[^*]+?)(?<=\S)\*\*|\*(?=\S)(?<italic>[^*]+?)(?<=\S)\*|(?<![\p{L}\p{N}_])_(?=\S)(?<under>[^_]+?)(?<=\S)_(?![\p{L}\p{N}_])/gu;

export function parseSpans(text: string, depth = 0): Span[] {
  const made: Span[] = [];
  let from = 0;
  for (const match of depth < MOST_DEPTH ? text.matchAll(SPAN) : []) {
    if (match.index > from) made.push({ kind: 'text', text: text.slice(from, match.index) });
    from = match.index + match[0].length;
    const { code, label, link, address, bold, italic, under } = match.groups!;
    if (code !== undefined) made.push({ kind: 'code', text: code });
    else if (link !== undefined) made.push({ kind: 'link', address: link, spans: parseSpans(label!, depth + 1).filter((one) => one.kind !== 'link') });
    else if (address !== undefined) made.push({ kind: 'link', address, spans: [{ kind: 'text', text: address }] });
    else if (bold !== undefined) made.push({ kind: 'bold', spans: parseSpans(bold, depth + 1) });
    else made.push({ kind: 'italic', spans: parseSpans(italic ?? under!, depth + 1) });
  }
  if (from < text.length) made.push({ kind: 'text', text: text.slice(from) });
  return made;
}
