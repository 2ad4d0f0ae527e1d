"use strict";
// Markdown as a tree over the places of a text: a node is [tag, attributes, children], a leaf [from, to].
// Nothing of the text becomes a tag: who builds the tree makes elements of these few kinds, and texts of all else.
// A tree takes time in proportion to its text, whatever that is.

const markdown = (() => {
  const DEEPEST = 12;
  const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})\s*(\S*)/;
  const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
  const RULE = /^ {0,3}([-*_])[ \t]*(\1[ \t]*){2,}$/;
  const QUOTE = /^ {0,3}> ?/;
  const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])([ \t]+|$)/;
  const ITEM_AMID_WORDS = /^ {0,3}([-*+]|1[.)])[ \t]+\S/;
  const BEGINS = [FENCE, HEADING, RULE, QUOTE];
  const WEB = /^(https?:|mailto:)/i;
  const WORD = /[\p{L}\p{N}]/u;
  // escaped sign | code, of few backticks so that few look for their end in vain | emphasis, deleted | begin and end of a link
  const INLINE = /\\([!-/:-@[-`{-~])|(?<!`)(`{1,8})(?!`)([^]*?[^`])\2(?!`)|\*+|_+|~+|\[|\](?:\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\))?/g;
  const TAGS = { "*": "em", "**": "strong", "***": "both", _: "em", "~~": "del", "[": "a" };

  return (source) => {
    const at = ([from, to]) => source.slice(from, to);
    const isBegin = (line, item) => item.test(line) || BEGINS.some((each) => each.test(line));
    const isBelowHead = (line) => /^[ \t|:-]+$/.test(line) && line.includes("-") && line.includes("|");

    // A text that begins at a place of the source, with \0 for each sign there that is none of its own.
    function inline(place, text) {
      const found = [];
      let done = 0, open = []; // signs that may open an element, each with its index in what is found
      const told = (from, to) => [...text.slice(from, to).matchAll(/[^\n\0]+|\n/g)].map(({ 0: run, index }) =>
        run === "\n" ? ["br", {}, []] : [place + from + index, place + from + index + run.length]);
      const tell = (to, next) => {
        for (const each of told(done, to)) found.push(each);
        done = next;
      };
      const opens = (sign) => {
        open = [...open.slice(1 - DEEPEST), { sign, index: found.length }];
        tell(done + sign.length, done + sign.length);
      };
      const closes = (opener, attributes) => {
        found.push([TAGS[opener.sign], attributes, found.splice(opener.index).slice(1)]);
        open.length = open.indexOf(opener);
      };
      for (const match of text.matchAll(INLINE)) {
        const [sign, escaped, ticks, code, href] = match, kind = sign[0], begin = match.index, end = begin + sign.length;
        if (escaped) {
          tell(begin, begin + 1);
        } else if (code) {
          const inset = ticks.length + (code.trim() && code[0] === " " && code.endsWith(" ") ? 1 : 0);
          tell(begin, end);
          found.push(["code", {}, told(begin + inset, end - inset)]);
        } else if (kind === "]") {
          const opener = open.findLast((each) => each.sign === "[");
          const isLink = opener && WEB.test(href) && text[begin - 1] !== "[";
          if (isLink) {
            tell(begin, end);
            closes(opener, { href, target: "_blank", rel: "noopener noreferrer" });
          }
          open = open.filter((each) => each !== opener && !(isLink && each.sign === "[")); // no link holds another
        } else if (sign in TAGS) {
          const before = text[begin - 1] || " ", after = text[end] || " ", isWord = (each) => kind === "_" && WORD.test(each);
          const mayOpen = kind === "[" || (after.trim() && !isWord(before));
          const mayClose = kind !== "[" && /[^\s\0]/.test(before) && !isWord(after);
          const fits = (each) => each.sign[0] === kind && (end - done === 3 || each.sign.length === end - done);
          tell(begin, begin);
          for (let opener; mayClose && done < end && (opener = open.findLast(fits)); ) {
            done += opener.sign.length;
            closes(opener, {});
          }
          const rest = sign.slice(done - begin);
          if (mayOpen && rest) (rest === "***" ? ["*", "**"] : [rest]).forEach(opens);
        }
      }
      tell(text.length);
      return found;
    }

    function cells([from, to]) {
      const row = at([from, to]).trim(), begin = from + at([from, to]).indexOf(row);
      const all = [...row.matchAll(/(?:^(?!\|)|\|)((?:\\.?|[^|\\])*)/g)];
      if (all.length > 1 && !all[all.length - 1][1]) all.pop();
      return all.map(({ 0: { length }, 1: cell, index }) => {
        const place = begin + index + length - cell.trimStart().length;
        return inline(place, cell.trim().replace(/\\(?=\|)/g, "\0"));
      });
    }

    function list(lines, i, depth) {
      const isOrdered = (match) => /\d/.test(match[2]);
      const first = ITEM.exec(at(lines[i])), items = [];
      for (let item; i < lines.length && (item = ITEM.exec(at(lines[i]))) && isOrdered(item) === isOrdered(first); ) {
        const inner = [[lines[i][0] + item[0].length, lines[i][1]]];
        for (let blank = false; ++i < lines.length; ) {
          const line = at(lines[i]), indent = line.search(/\S|$/), isBlank = indent === line.length;
          const belongs = isBlank || indent >= item[1].length + 2 || !(blank || isBegin(line, ITEM));
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
          found.push([`h${heading[1].length}`, {}, inline(lines[begin][0] + heading[0].length, line.slice(heading[0].length))]);
        } else if (RULE.test(line)) {
          found.push(["hr", {}, []]);
        } else if (QUOTE.test(line) && depth < DEEPEST) {
          const quoted = taken((each) => QUOTE.test(each));
          found.push(["blockquote", {}, blocks(quoted.map((each) => [each[0] + QUOTE.exec(at(each))[0].length, each[1]]), depth + 1)]);
        } else if (ITEM.test(line) && depth < DEEPEST) {
          const [next, made] = list(lines, begin, depth);
          i = next;
          found.push(made);
        } else if (line.includes("|") && i < lines.length && isBelowHead(at(lines[i]))) {
          const rows = taken((each) => each.includes("|")).filter((_, n) => n !== 1);
          found.push(["table", {}, rows.map((row, n) => ["tr", {}, cells(row).map((cell) => [n ? "td" : "th", {}, cell])])]);
        } else {
          const words = taken((each) => each.trim() && !isBegin(each, ITEM_AMID_WORDS)), first = words[0][0];
          const text = words.reduce((told, [a, b]) => (told && `${told}\n`).padEnd(a - first, "\0") + at([a, b]), "");
          found.push(["p", {}, inline(first, text)]);
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
