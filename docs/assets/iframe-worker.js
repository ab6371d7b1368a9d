// Pages opened from the disk: browsers start no worker there, so the worker of the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.body.appendChild(Object.assign(document.createElement("iframe"), { hidden: true }));
      const inner = this.frame.contentWindow;
      inner.postMessage = (data) => setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })));
      inner.importScripts = (...urls) => urls.reduce((before, one) => before.then(() => this.load(one)), this.ready);
      this.ready = this.load(url);
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    load(url) {
      const inner = this.frame.contentDocument;
      return new Promise((onload, onerror) =>
        inner.head.appendChild(Object.assign(inner.createElement("script"), { src: new URL(url, location), onload, onerror })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
