"use strict";
// Markdown as a tree over the places of a text: a node is [tag, attributes, children], a leaf [from, to].
// Nothing of the text becomes a tag: who builds the tree makes elements of these few kinds, and texts of all else.

const markdown = (() => {
  const DEEPEST = 12;
  const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
  const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
  const RULE = /^ {0,3}([-*_])[ \t]*(\1[ \t]*){2,}$/;
  const QUOTE = /^ {0,3}> ?/;
  const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])([ \t]+|$)/;
  const BELOW_HEAD = /^(?=.*\|)[ \t|:-]*-[ \t|:-]*$/;
  const BEGINS = [FENCE, HEADING, RULE, QUOTE, ITEM];
  const WEB = /^(https?:|mailto:)/i;
  // escaped sign | code | both | strong | em with stars | em with underscores | deleted | words and place of a link
  const INLINE = /\\([!-/:-@[-`{-~])|`([^`]+)`|\*{3}(?=\S)([^*]*[^*\s])\*{3}|\*\*(?=\S)((?:[^*]|\*(?!\*))*?[^\s*]\*?)\*\*(?!\*)|\*(?=[^\s*])([^*]*[^*\s])\*(?!\*)|(?<!\w)_(?=\S)([^_]*[^_\s])_(?!\w)|~~(?=\S)([^~]*[^~\s])~~|\[([^[\]]+)\]\(([^()\s]+)\)/g;
  const INNER = [null, ["code"], ["strong", "em"], ["strong"], ["em"], ["em"], ["del"]];

  return (source) => {
    const at = ([from, to]) => source.slice(from, to);
    const nested = (tags, children) => tags.reduceRight((inner, tag) => [[tag, {}, inner]], children);

    function inline([from, to]) {
      const found = [];
      let done = from;
      for (const match of source.slice(from, to).matchAll(INLINE)) {
        const kind = match.slice(1).findIndex((group) => group !== undefined);
        const begin = from + match.index, end = begin + match[0].length;
        if (kind === 7 && !WEB.test(match[9])) continue;
        if (done < begin) found.push([done, begin]);
        const inside = begin + match[0].indexOf(match[kind + 1]);
        const within = [inside, inside + match[kind + 1].length];
        if (kind === 0) found.push(within);
        else if (kind === 7) found.push(["a", { href: match[9], target: "_blank", rel: "noopener noreferrer" }, inline(within)]);
        else found.push(...nested(INNER[kind], kind === 1 ? [within] : inline(within)));
        done = end;
      }
      if (done < to) found.push([done, to]);
      return found;
    }

    function cells([from, to]) {
      const trim = ([a, b]) => [a + at([a, b]).search(/\S|$/), a + at([a, b]).trimEnd().length];
      const [begin, end] = trim([from, to]);
      return [...at([begin, end]).matchAll(/(?:\\.|[^|\\])+/g)].map((m) => trim([begin + m.index, begin + m.index + m[0].length]));
    }

    function list(lines, i, depth) {
      const isOrdered = (match) => /\d/.test(match[2]);
      const first = ITEM.exec(at(lines[i])), items = [];
      for (let item; i < lines.length && (item = ITEM.exec(at(lines[i]))) && isOrdered(item) === isOrdered(first); ) {
        const inner = [[lines[i][0] + item[0].length, lines[i][1]]];
        for (let blank = false; ++i < lines.length; ) {
          const line = at(lines[i]), indent = line.search(/\S|$/), isBlank = indent === line.length;
          const belongs = isBlank || indent >= item[1].length + 2 || !(blank || BEGINS.some((each) => each.test(line)));
          if (!belongs) break;
          inner.push([lines[i][0] + Math.min(indent, item[0].length), lines[i][1]]);
          blank = isBlank;
        }
        items.push(["li", {}, blocks(inner, depth + 1)]);
      }
      return [i, isOrdered(first) ? ["ol", { start: parseInt(first[2], 10) }, items] : ["ul", {}, items]];
    }

    function blocks(lines, depth) {
      const found = [];
      for (let i = 0; i < lines.length; ) {
        const line = at(lines[i]), fence = FENCE.exec(line), heading = HEADING.exec(line);
        const begin = i++;
        const taken = (goes) => {
          while (i < lines.length && goes(at(lines[i]))) i++;
          return lines.slice(begin, i);
        };
        if (!line.trim()) continue;
        if (fence) {
          const end = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
          const code = taken((each) => !end.test(each)).slice(1);
          found.push(["pre", { "data-language": fence[2] }, [["code", {}, code.map(([a, b]) => [a, Math.min(b + 1, source.length)])]]]);
          i++;
        } else if (heading) {
          found.push([`h${heading[1].length}`, {}, inline([lines[begin][0] + heading[0].length, lines[begin][1]])]);
        } else if (RULE.test(line)) {
          found.push(["hr", {}, []]);
        } else if (QUOTE.test(line) && depth < DEEPEST) {
          const quoted = taken((each) => QUOTE.test(each));
          found.push(["blockquote", {}, blocks(quoted.map((each) => [each[0] + QUOTE.exec(at(each))[0].length, each[1]]), depth + 1)]);
        } else if (ITEM.test(line) && depth < DEEPEST) {
          const [next, made] = list(lines, begin, depth);
          i = next;
          found.push(made);
        } else if (line.includes("|") && i < lines.length && BELOW_HEAD.test(at(lines[i]))) {
          const rows = taken((each) => each.includes("|")).filter((_, n) => n !== 1);
          found.push(["table", {}, rows.map((row, n) => ["tr", {}, cells(row).map((cell) => [n ? "td" : "th", {}, inline(cell)])])]);
        } else {
          const words = taken((each) => each.trim() && !BEGINS.some((begins) => begins.test(each)));
          found.push(["p", {}, words.flatMap((each, n) => [...(n ? [["br", {}, []]] : []), ...inline(each)])]);
        }
      }
      return found;
    }

    const lines = [];
    for (let from = 0; from <= source.length; from = lines[lines.length - 1][1] + 1) {
      const to = source.indexOf("\n", from);
      lines.push([from, to < 0 ? source.length : to]);
    }
    return blocks(lines, 0);
  };
})();
