// Elements of the page. Text is always set as text, since names and errors are other people's words.

const SVG = "http://www.w3.org/2000/svg";

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function drawing(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export function table(caption, columns, rows, none) {
  if (!rows.length) return [make("p", { className: "none", textContent: none })];
  const head = columns.map(([title, kind]) => make("th", { scope: "col", className: kind ?? "", textContent: title }));
  const body = rows.map((cells) => make("tr", {}, ...cells.map((cell, i) => {
    const [title, kind] = columns[i];
    const td = make("td", { className: kind ?? "", "data-label": title });
    td.append(cell ?? "");
    return td;
  })));
  return [make("table", { ariaLabel: caption }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body))];
}
